"""Ends a process when another one of its run has failed or gone silent, whatever it is waiting for.

A collective operation of which one process never comes may wait for minutes (gloo, NCCL), and no exception reaches a
thread that waits in one. So every process has a thread that talks to the run's store: it beats there, looks after the
next process, and reads the word that a failing process leaves.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from torch._C._distributed_c10d import Store

FAULT, DONE = "fault", "done"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Seconds: between two beats; without a beat until a process counts as gone; for a failing one to say why."""

    beat: float = 1.0
    silence: float = 15.0
    grace: float = 3.0


DEFAULT_PATIENCE = Patience()


class Watch:
    """The thread of process `rank` of `size`. connect: opens a connection to the store for it alone.

    names: how the others are called in messages. loud: whether this process, if ended, says why on stderr.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        *,
        rank: int,
        size: int,
        loud: bool,
        patience: Patience,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self._connect, self._rank, self._size, self._loud = connect, rank, size, loud
        self._patience, self._end = patience, end
        self._store: Store | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._store = self._connect()
        self._thread.start()

    def stop(self, fault: str | None = None) -> None:
        """Stop watching, in peace or because of a fault, which ends the other processes too."""
        self._stopped.set()
        self._thread.join(timeout=self._patience.grace)
        assert self._store is not None, "start first"
        try:
            if fault is None:
                self._store.set(_beat(self._rank), DONE)
            else:
                self._store.compare_set(FAULT, "", fault)  # the first fault is the cause, later ones follow from it
        except RuntimeError:  # the store is gone, and with it whoever could read this
            pass

    def _run(self) -> None:
        store, peer, heard, last = self._store, (self._rank + 1) % self._size, time.monotonic(), b""
        assert store is not None
        try:
            count, turn = 0, heard
            while not self._stopped.wait(self._patience.beat):
                count, before, turn = count + 1, turn, time.monotonic()
                if turn - before > self._patience.silence / 2:
                    heard = turn  # this process was asleep itself, as after ctrl-Z, and cannot tell
                store.set(_beat(self._rank), str(count))
                if store.check([FAULT]):
                    self._give_up(store.get(FAULT).decode())
                    return
                beat = store.get(_beat(peer)) if store.check([_beat(peer)]) else b""
                if beat != last or beat == DONE.encode():
                    heard, last = turn, beat
                elif turn - heard > self._patience.silence:
                    fault = f"rank {peer} has not been heard of for {self._patience.silence:.0f} s"
                    store.compare_set(FAULT, "", fault)
                    self._give_up(fault)
                    return
        except RuntimeError:
            self._give_up("the process that keeps the run together is gone")

    def _give_up(self, cause: str) -> None:
        if self._stopped.wait(self._patience.grace):
            return  # it has noticed by itself
        if self._loud:
            print(f"compressed-spec: rank {self._rank} ends because of another process: {cause}", file=sys.stderr)
            sys.stderr.flush()
        self._end(1)


def _beat(rank: int) -> str:
    return f"beat/{rank}"
