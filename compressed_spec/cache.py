"""The state of a batch of sequences: pools, and `commit`, the one thing that writes persistent rows after a round.

L = layers, R = rows, D = row width
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from compressed_spec.kernels.commit import MoveRows
from compressed_spec.kernels.fp8_rows import decode_rows, encode_rows
from compressed_spec.layout import Addressing, CacheShape, PoolSpec, StateSpec, pool_specs
from compressed_spec.moves import Lanes, accepted_nodes
from compressed_spec.partial import Stopped
from compressed_spec.rows import RowPlan
from compressed_spec.tree import TokenTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What one verify computed: scratch rows in the cache, and here the logits.

    trees, rows: the trees, and the batch row each grows from. logits: float32 or wider `[T, V]`, nodes of the trees one
    after the other. ticket: stands for one round of one cache.
    """

    trees: tuple[TokenTree, ...]
    rows: tuple[int, ...]
    logits: torch.Tensor
    plan: RowPlan
    ticket: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A copy of some rows' state: their lengths, and by pool the rows that they own, `[L, n, D]` a sequence."""

    lengths: tuple[int, ...]
    spec: StateSpec
    pools: tuple[dict[str, torch.Tensor], ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for pools in self.pools for tensor in pools.values())


class Scratch:
    """Where one forward writes its nodes' rows.

    slot_T: the nodes' slots (a plan's), None for 0 .. T. In place by default. `out_of_place=True` builds persistent and
    scratch rows as a new tensor, so that autograd can follow it: that is how the model is trained.
    """

    def __init__(self, cache: "Cache", slot_T: torch.Tensor | None = None, *, out_of_place: bool = False) -> None:
        self.cache, self.in_place = cache, not out_of_place
        self._slot_T = slot_T

    def write(
        self, pool: str, layer: int, values_ND: torch.Tensor, first: int = 0, *, slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Write one row a node to a layer of a pool, or rows to `slots`; returns all its rows `[R, D]`.

        first: slot of the first node, where the nodes lie one after the other.
        """
        rows_RD, persistent = self.cache.pools[pool][layer], self.cache.num_persistent(pool)
        values_ND, slots = self.cache.rows_of(pool, values_ND), self._slot_T if slots is None else slots
        if not self.in_place:
            if slots is not None:
                num_slots = int(slots.max()) + 1 if len(slots) else 0
                values_ND = values_ND.new_full((num_slots, values_ND.shape[1]), math.nan).index_copy(
                    0, slots, values_ND
                )
            return torch.cat((rows_RD[:persistent], values_ND))
        if slots is None:
            rows_RD[persistent + first : persistent + first + len(values_ND)] = values_ND
        else:
            rows_RD[persistent:].index_copy_(0, slots, values_ND)
        return rows_RD

    def layer_rows(self, pool: str, layer: int) -> torch.Tensor:
        """All rows of a layer of a pool `[R, D]`, to be written in place (see `first_row`)."""
        return self.cache.layers[pool][layer]

    def has(self, pool: str) -> bool:
        """Whether there is a pool of this name."""
        return pool in self.cache.pools

    def first_row(self, pool: str) -> int:
        """Row of a pool that slot 0 is."""
        return self.cache.num_persistent(pool)

    def rows(self, pool: str, layer: int) -> torch.Tensor:
        """All rows of a layer of a pool `[R, D]`, where this forward has none to write."""
        rows_RD = self.cache.pools[pool][layer]
        return rows_RD[: self.cache.num_persistent(pool)] if not self.in_place else rows_RD


class Cache:
    """Pools for `batch_size` sequences of at most `max_length` tokens; a row of length 0 is free.

    Memory that nobody has written is NaN, so that a wrong row id shows. Nothing but `commit`, `fork` and `restore`
    writes persistent rows. Raises ValueError if the pools do not fit into the device's memory.

    move_rows: moves all rows of a commit at once, None for one copy a pool.
    """

    def __init__(
        self, spec: StateSpec, shape: CacheShape, device: torch.device, move_rows: MoveRows | None = None
    ) -> None:
        self.spec, self.shape, self.device, self._move_rows = spec, shape, device, move_rows
        self._specs = {pool.name: pool for pool in pool_specs(spec, shape.max_length)}
        try:
            self.pools = {
                pool.name: torch.full(
                    (pool.num_layers, self.num_persistent(pool.name) + shape.num_scratch(pool), pool.dim),
                    255 if pool.packed else float("nan"),  # packed: codes, scales and tails that are no numbers
                    dtype=pool.dtype,
                    device=device,
                )
                for pool in self._specs.values()
            }
        except RuntimeError as error:  # torch's word for memory that is not there, on any device
            raise ValueError(
                f"A cache of {shape.nbytes(spec)} bytes does not fit into the memory of {str(device)!r}: lower "
                "batch_size, max_length or max_nodes."
            ) from error
        self._lanes = Lanes(list(self._specs.values()), shape.batch_size)
        self.layers = {name: rows_LRD.unbind(0) for name, rows_LRD in self.pools.items()}
        self._lengths = [0] * shape.batch_size
        self._damaged: set[int] = set()
        self._ticket = object()
        self._stopped: Stopped | None = None

    @property
    def lengths(self) -> tuple[int, ...]:
        """Committed tokens of each row."""
        return tuple(self._lengths)

    @property
    def nbytes(self) -> int:
        """Bytes of all pools, scratch included."""
        return sum(pool.nbytes for pool in self.pools.values())

    def num_persistent(self, pool: str) -> int:
        """Persistent rows of a pool; its scratch rows follow them."""
        return self.shape.batch_size * self._specs[pool].per_sequence

    def rows_of(self, pool: str, values_ND: torch.Tensor) -> torch.Tensor:
        """Rows as a pool keeps them: in its dtype, or packed."""
        if self._specs[pool].packed:
            assert self.spec.fp8_rotated is not None
            return encode_rows(values_ND, self.spec.fp8_rotated)
        return values_ND.to(self._specs[pool].dtype)

    def scratch_rows(self, count: int) -> Iterator[torch.Tensor]:
        """The first `count` scratch rows of each pool."""
        for name, rows_LRD in self.pools.items():
            first = self.num_persistent(name)
            yield rows_LRD[:, first : first + count]

    def check_rows(self, rows: Sequence[int], *, whole: bool = True) -> None:
        """Raise ValueError unless `rows` are different rows of this cache, and undamaged if `whole`."""
        if len(set(rows)) != len(rows) or not all(0 <= row < self.shape.batch_size for row in rows):
            raise ValueError(
                f"Rows {list(rows)} must be different and lie in 0 .. {self.shape.batch_size - 1}: name others, or "
                "make a cache with a larger batch_size."
            )
        damaged = sorted(self._damaged & set(rows)) if whole else []
        if damaged:
            raise ValueError(
                f"Row {damaged[0]} was left half written by an operation that failed: release it, or restore a "
                "snapshot into it."
            )

    def mark_damaged(self, rows: Sequence[int]) -> None:
        """Refuse these rows until they are released, or overwritten by `fork` or `restore`."""
        self._damaged.update(rows)

    def next_ticket(self) -> object:
        """Begin a round: whatever was verified before can no longer be committed."""
        self._ticket, self._stopped = object(), None
        return self._ticket

    @property
    def stopped(self) -> Stopped | None:
        """Nodes that this round has taken through the first layers, for its verification to go on from."""
        return self._stopped

    def keep(self, stopped: Stopped, ticket: object) -> None:
        """Remember them until another round begins. ticket: of the round in which all of them were processed."""
        assert ticket is self._ticket, "another round has begun, and may have overwritten their rows"
        self._stopped = stopped

    def commit(self, verify: Verification, paths: Sequence[Sequence[int]]) -> None:
        """Make the rows of the accepted nodes persistent, one path of node ids a tree (root first; may be empty).

        Raises ValueError if a path does not run along its tree, or if `verify` is not the cache's latest round or was
        committed before; nothing is written then. After any other exception the rows are refused until released.
        """
        paths = [[int(node) for node in path] for path in paths]
        if verify.ticket is not self._ticket:
            raise ValueError("This verification is no longer the cache's latest round: verify again before committing.")
        if len(paths) != len(verify.trees):
            raise ValueError(f"Commit needs one path a tree, got {len(paths)} paths for {len(verify.trees)} trees.")
        for tree, path in zip(verify.trees, paths, strict=True):
            tree.check_path(path)
        self.next_ticket()
        accepted = accepted_nodes(verify.plan.nodes, verify.trees, paths)
        if not len(accepted.slot_F):
            return
        grown = [row for row, path in zip(verify.rows, paths, strict=True) if path]
        self.mark_damaged(grown)  # until all pools agree again
        if self._move_rows is not None:
            moves = self._lanes.moves_at_once(accepted, self.device)
            self._move_rows(list(self.pools.values()), self._lanes.lane_of, moves)
        else:
            for pools, (source, target) in zip(
                self._lanes.pools, self._lanes.moves(accepted, self.device), strict=True
            ):
                self._move(pools, source, target)
        for row, path in zip(verify.rows, paths, strict=True):
            self._lengths[row] += len(path)
        self._damaged.difference_update(grown)

    def committed(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Take note of tokens that the device has committed by itself, in rows marked as damaged before."""
        self.next_ticket()
        for row, count in zip(rows, counts, strict=True):
            self._lengths[row] += count
        self._damaged.difference_update(rows)

    def _move(self, pools: Sequence[str], source: torch.Tensor, target: torch.Tensor) -> None:
        if len(source):
            for name in pools:
                rows_LRD = self.pools[name]
                rows_LRD.index_copy_(1, target, rows_LRD.index_select(1, source))

    def _owned(self, pool: PoolSpec, row: int, length: int) -> slice:
        """Persistent rows of a sequence: all of a ring, the entries that a length has."""
        count = pool.per_sequence
        if pool.addressing is Addressing.ENTRIES:
            assert pool.compression is not None
            count = pool.compression.num_entries(length)
        return slice(row * pool.per_sequence, row * pool.per_sequence + count)

    def fork(self, src: int, dst: int) -> None:
        """Make row `dst` a copy of row `src`, which may then go its own way. Any verification becomes void."""
        self.check_rows((src, dst), whole=False)
        self.check_rows((src,))
        self.next_ticket()
        self.mark_damaged((dst,))
        for name, pool in self._specs.items():
            rows_LRD = self.pools[name]
            length = self._lengths[src]
            rows_LRD[:, self._owned(pool, dst, length)] = rows_LRD[:, self._owned(pool, src, length)]
        self._lengths[dst] = self._lengths[src]
        self._damaged.discard(dst)

    def release(self, row: int) -> None:
        """Free a row. Any verification becomes void."""
        self.check_rows((row,), whole=False)
        self.next_ticket()
        self._lengths[row] = 0
        self._damaged.discard(row)

    def snapshot(self, rows: Sequence[int] | None = None) -> Snapshot:
        """Copy the state of rows (all by default) as it is now. Does not modify the cache."""
        rows = range(self.shape.batch_size) if rows is None else rows
        self.check_rows(rows)
        return Snapshot(
            lengths=tuple(self._lengths[row] for row in rows),
            spec=self.spec,
            pools=tuple(
                {
                    name: self.pools[name][:, self._owned(pool, row, self._lengths[row])].clone()
                    for name, pool in self._specs.items()
                }
                for row in rows
            ),
        )

    def restore(self, snapshot: Snapshot, rows: Sequence[int] | None = None) -> None:
        """Put a snapshot's sequences back, by default in rows 0 ..; they may be other rows or another cache.

        Raises ValueError if the snapshot is of another model, has another number of rows, or is longer than the cache.
        """
        rows = range(len(snapshot.lengths)) if rows is None else rows
        self.check_rows(rows, whole=False)
        if snapshot.spec != self.spec:
            raise ValueError("This snapshot holds another model's state: restore it into a cache of the same model.")
        if len(rows) != len(snapshot.lengths):
            raise ValueError(f"The snapshot holds {len(snapshot.lengths)} rows, but {len(rows)} were named for it.")
        if max(snapshot.lengths, default=0) > self.shape.max_length:
            raise ValueError(
                f"The snapshot has {max(snapshot.lengths)} tokens, more than the cache's max_length "
                f"{self.shape.max_length}: make a longer cache."
            )
        for length, pools in zip(snapshot.lengths, snapshot.pools, strict=True):
            for name, pool in self._specs.items():
                owned = self._owned(pool, 0, length)
                assert pools[name].shape[1] == owned.stop, f"{name} does not hold {length} tokens"
        self.next_ticket()
        self.mark_damaged(rows)
        for row, length, pools in zip(rows, snapshot.lengths, snapshot.pools, strict=True):
            for name, pool in self._specs.items():
                self.pools[name][:, self._owned(pool, row, length)] = pools[name].to(self.device)
            self._lengths[row] = length
        self._damaged.difference_update(rows)

    def check_integrity(self) -> None:
        """Raise ValueError if a committed row that a later token will read holds NaN. For tests and debugging: slow."""
        for name, pool in self._specs.items():
            for row, length in enumerate(self._lengths):
                owned = self._owned(pool, row, length)
                num_written = {
                    Addressing.RING: min(max(length + pool.shift, 0), pool.per_sequence),
                    Addressing.ENTRIES: owned.stop - owned.start,
                    Addressing.SINGLE: min(length, 1),
                }[pool.addressing]
                # A ring that has not come round yet is written from its first slot on.
                written = self.pools[name][:, owned.start : owned.start + num_written]
                if pool.packed and self.spec.fp8_rotated is not None:
                    written = decode_rows(written.flatten(0, 1), self.spec.head_dim, self.spec.fp8_rotated)
                if not bool(torch.isfinite(written).all()):
                    raise ValueError(f"Pool {name} holds values that are not finite in row {row} of {length} tokens.")
