"""From torchrun's environment to the processes that share a model, and back to one of them alone that speaks.

One process without torchrun is a run too: every function here then does nothing.
"""

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from compressed_spec.parallel import ALONE, ParallelGroup, PeerError
from compressed_spec.watch import DEFAULT_PATIENCE, Patience, Watch

_STORE_TIMEOUT = timedelta(seconds=60)  # for all nodes to start
_DOWNLOAD_TIMEOUT = timedelta(days=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """This process's place among those that torchrun started: of all, and of those on its node."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    node: int = 0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> "Process":
        """As torchrun's variables say; one process alone where WORLD_SIZE is missing or 1.

        Raises ValueError for variables that are missing or make no sense.
        """
        try:
            world_size = int(environment.get("WORLD_SIZE", "1"))
            if world_size == 1:
                return cls()
            process = cls(
                rank=int(environment["RANK"]),
                world_size=world_size,
                local_rank=int(environment["LOCAL_RANK"]),
                node=int(environment["GROUP_RANK"]),
            )
        except KeyError as missing:
            raise ValueError(
                f"WORLD_SIZE is {environment['WORLD_SIZE']} but {missing.args[0]} is not set: start the processes with "
                "torchrun."
            ) from None
        except ValueError:
            raise ValueError("RANK, WORLD_SIZE, LOCAL_RANK or GROUP_RANK is no number: use torchrun.") from None
        if not 0 <= process.rank < world_size:
            raise ValueError(f"RANK is {process.rank} but WORLD_SIZE {world_size}: start the processes with torchrun.")
        return process

    @property
    def is_first(self) -> bool:
        """Whether this process is the one that prints and writes."""
        return self.rank == 0

    @property
    def name(self) -> str:
        return f"rank {self.rank} on {socket.gethostname()}"

    def device(self, name: str) -> str:
        """The device that this process uses where the user says `name`: one GPU each."""
        return f"cuda:{self.local_rank}" if name == "cuda" and self.world_size > 1 else name


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A run under way. group: the processes that share this process's model.

    replica, num_replicas: which copy of the model that is, where there are several (each takes its share of the work).
    """

    process: Process
    group: ParallelGroup = ALONE
    replica: int = 0
    num_replicas: int = 1
    store: Store | None = None

    def once_per_node(self, what: str, action: Callable[[], str]) -> str:
        """What `action` returns on the first process of each node, such as the folder of a download.

        what: names the action, differently for each in a run. If it raises ValueError there, the node's other processes
        raise PeerError.
        """
        if self.store is None:
            return action()
        key = f"once/{self.process.node}/{what}"
        if self.process.local_rank == 0:
            try:
                result = action()
            except ValueError as error:
                self.store.set(key, f"!{error}")
                raise
            self.store.set(key, f"={result}")
            return result
        self.store.wait([key], _DOWNLOAD_TIMEOUT)
        answer = self.store.get(key).decode()
        if answer.startswith("!"):
            raise PeerError(answer[1:])
        return answer[1:]


def groups_of(world_size: int, group_size: int) -> list[range]:
    """The ranks of each group: neighbours share a model, so that a group lies on one node where it fits one.

    Raises ValueError if the processes cannot be divided into such groups.
    """
    if group_size < 1 or world_size % group_size:
        raise ValueError(
            f"{world_size} processes cannot be divided into groups of {group_size}: start a multiple of it."
        )
    return [range(first, first + group_size) for first in range(0, world_size, group_size)]


@contextmanager
def join(
    process: Process, *, device: str, group_size: int | None = None, patience: Patience = DEFAULT_PATIENCE
) -> Iterator[Run]:
    """Take part in a run, once in a process: connect to its other processes, and leave together with them.

    device: where tensors that are exchanged lie; "cuda:0" and the like need NCCL. group_size: processes that share a
    model, all of them by default. Inside, a failure of any process ends every other one within half a minute, with the
    cause on stderr. Raises ValueError if the others cannot be reached.
    """
    groups = groups_of(process.world_size, group_size or process.world_size)
    if process.world_size == 1:
        yield Run(process=process)
        return
    connect = _store_address(process)
    watch = Watch(
        lambda: PrefixStore("watch", connect(False)),
        rank=process.rank,
        size=process.world_size,
        loud=process.local_rank == 0,
        patience=patience,
    )
    store = connect(True)
    watch.start()
    try:
        yield _connected(process, groups, PrefixStore("run", store), device)
        dist.all_reduce(torch.zeros(1))  # nobody leaves, and takes the store along, before the last one is done
    except BaseException as error:
        watch.stop(f"{process.name} stopped with {type(error).__name__}: {error}")
        if isinstance(error, PeerError) and not process.is_first:
            time.sleep(patience.grace)  # torchrun ends everybody when one ends: first let the first say why
        raise
    watch.stop()
    dist.destroy_process_group()


def _store_address(process: Process) -> Callable[[bool], Store]:
    """Opens connections to the run's store, kept by torchrun, or else by the first process from its first one on."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdigit():
        raise ValueError("MASTER_ADDR or MASTER_PORT is not set: start the processes with torchrun.")
    kept_by_us = process.is_first and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"

    def connect(may_keep: bool) -> Store:
        try:
            return TCPStore(
                host,
                int(port),
                is_master=kept_by_us and may_keep,
                wait_for_workers=False,
                timeout=_STORE_TIMEOUT,
            )
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"The run's store at {host}:{port} cannot be used ({reason}): choose another --master-port, or see "
                "that the first node can be reached."
            ) from error

    return connect


def _connected(process: Process, groups: list[range], store: Store, device: str) -> Run:
    try:
        torch.empty(0, device=device)
        cuda = torch.device(device).type == "cuda"
        if cuda:
            torch.cuda.set_device(device)
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without it
        reason = str(error).splitlines()[0].rstrip(".")
        raise ValueError(
            f"Device {device!r} cannot be used ({reason}): start one process a GPU on each node."
        ) from None
    # Decisions and reports travel as CPU tensors, so that they never wait for a GPU.
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=process.rank, world_size=process.world_size)
    handles = [dist.new_group(list(ranks)) for ranks in groups] if len(groups) > 1 else [dist.group.WORLD]
    replica = next(i for i, ranks in enumerate(groups) if process.rank in ranks)
    ranks = groups[replica]
    return Run(
        process=process,
        group=ParallelGroup(
            rank=process.rank - ranks.start, size=len(ranks), handle=handles[replica], name=process.name
        )
        if len(ranks) > 1
        else ALONE,
        replica=replica,
        num_replicas=len(groups),
        store=store,
    )
