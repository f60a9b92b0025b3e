"""Reuse of common prompt beginnings: states kept by the tokens that made them."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from compressed_spec.cache import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixMatch:
    """The longest stored prefix of some tokens: its length, and its state (None and length 0 if there is none)."""

    length: int
    snapshot: Snapshot | None


class PrefixStore:
    """Snapshots of single sequences by their tokens. Beyond `max_bytes` the least recently used ones go.

    A state can be reused at exactly the length at which it was taken: rings forget what a shorter prefix would need.
    A prefill needs at least one token to process, so look up all but a prompt's last token:

        match = store.longest(prompt_ids[:-1])
        if match.snapshot is not None:
            cache.restore(match.snapshot, rows=[row])
        logits = model.prefill(cache, [prompt_ids[match.length :]], rows=[row])
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._snapshots: OrderedDict[tuple[int, ...], Snapshot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._snapshots)

    @property
    def nbytes(self) -> int:
        """Bytes of all stored snapshots."""
        return sum(snapshot.nbytes for snapshot in self._snapshots.values())

    def put(self, token_ids: Sequence[int], snapshot: Snapshot) -> None:
        """Keep the state after `token_ids`, in place of one that is there.

        Raises ValueError unless the snapshot is of one sequence of that many tokens, at least one.
        """
        if snapshot.lengths != (len(token_ids),) or not token_ids:
            raise ValueError(
                f"A stored prefix needs a snapshot of one row that holds its {len(token_ids)} tokens, at least one; "
                f"this one has rows of {list(snapshot.lengths)}: take it with cache.snapshot([row]) at that length."
            )
        tokens = tuple(token_ids)
        self._snapshots[tokens] = snapshot
        self._snapshots.move_to_end(tokens)
        while self._max_bytes is not None and self._snapshots and self.nbytes > self._max_bytes:
            self._snapshots.popitem(last=False)

    def longest(self, token_ids: Sequence[int]) -> PrefixMatch:
        """The longest stored prefix of `token_ids`, all of them included. Never a shorter part of a stored one."""
        tokens = tuple(token_ids)
        lengths = {len(stored) for stored in self._snapshots if len(stored) <= len(tokens)}
        for length in sorted(lengths, reverse=True):
            snapshot = self._snapshots.get(tokens[:length])
            if snapshot is not None:
                self._snapshots.move_to_end(tokens[:length])
                return PrefixMatch(length=length, snapshot=snapshot)
        return PrefixMatch(length=0, snapshot=None)
