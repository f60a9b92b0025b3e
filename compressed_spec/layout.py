"""Which state a model keeps, and where its rows lie: persistent rows first, this round's scratch rows after them.

A pool is `[layers, rows, dim]`. Sequence b owns the persistent rows `b * per_sequence ...`: a ring by position, or an
append-only list of compressed entries, or a single row. Every node of a round has a *slot*: its scratch row in every
pool, that of the entry it closes (if it closes one) included.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

import torch

from compressed_spec.kernels.fp8_rows import row_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Compression:
    """One way of compressing that some layers of a model share (CSA: overlap and an index; HCA: neither).

    ratio: tokens an entry stands for. entry_dim: width of an entry. index_dim: width of an index key, 0 without an
    indexer. index_topk: most entries a node attends to, 0 for all.
    """

    ratio: int
    overlap: bool
    num_layers: int
    entry_dim: int
    index_dim: int = 0
    index_topk: int = 0

    @property
    def name(self) -> str:
        return f"{'csa' if self.overlap else 'hca'}{self.ratio}"

    @property
    def span(self) -> int:
        """Tokens that one entry pools."""
        return self.ratio * (2 if self.overlap else 1)

    def num_entries(self, length: int) -> int:
        """Entries of a sequence of `length` tokens."""
        return length // self.ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpec:
    """All state of a model.

    head_layers: layers of its draft head, 0 without one. head_shift: position of a token's row in the head's KV, from
    the token's own: 0 if it is made of the token's own streams, -1 if of those before, which then are kept too.
    num_streams, model_dim: the residual streams of a token. fp8_rotated: None for KV and entries in dtype; else they
    are kept in the format of `kernels.fp8_rows`, so many of their last channels rotated.
    """

    sliding_window: int
    num_layers: int
    head_dim: int
    compressions: tuple[Compression, ...]
    head_layers: int
    head_shift: int
    num_streams: int
    model_dim: int
    dtype: torch.dtype
    buffer_dtype: torch.dtype
    fp8_rotated: int | None = None

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of rows of KV and of entries: uint8 where they are packed."""
        return self.dtype if self.fp8_rotated is None else torch.uint8

    def kv_dim(self, width: int) -> int:
        """Numbers, or bytes, of a row of so many channels."""
        return width if self.fp8_rotated is None else row_bytes(width, self.fp8_rotated)


class Addressing(StrEnum):
    """How a pool's persistent rows are found."""

    RING = "ring"  # position modulo the ring
    ENTRIES = "entries"  # index of the compressed entry
    SINGLE = "single"  # one row a sequence: the newest


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """One pool. `shift` is what to add to a node's position to get the position of its row.

    drafted: whether a draft head writes scratch rows of its own nodes here. packed: whether rows are bytes, in the
    format of `kernels.fp8_rows`.
    """

    name: str
    num_layers: int
    dim: int
    dtype: torch.dtype
    addressing: Addressing
    per_sequence: int
    shift: int = 0
    compression: Compression | None = None
    drafted: bool = False
    packed: bool = False


def pool_specs(spec: StateSpec, max_length: int) -> Iterator[PoolSpec]:
    """Every pool of a model for sequences of at most `max_length` tokens."""
    ring, entries = Addressing.RING, Addressing.ENTRIES
    window, dtype, packed = spec.sliding_window, spec.dtype, spec.fp8_rotated is not None
    yield PoolSpec(
        name="window_kv",
        num_layers=spec.num_layers,
        dim=spec.kv_dim(spec.head_dim),
        dtype=spec.kv_dtype,
        addressing=ring,
        per_sequence=window,
        packed=packed,
    )
    for comp in spec.compressions:
        lanes = [("buffer", "compressed_kv", comp.entry_dim)]
        if comp.index_dim:
            lanes.append(("index_buffer", "index_kv", comp.index_dim))
        for buffer, entry, width in lanes:
            yield PoolSpec(
                name=f"{buffer}.{comp.name}",
                num_layers=comp.num_layers,
                dim=2 * width * (2 if comp.overlap else 1),
                dtype=spec.buffer_dtype,
                addressing=ring,
                per_sequence=comp.span,
                compression=comp,
            )
            yield PoolSpec(
                name=f"{entry}.{comp.name}",
                num_layers=comp.num_layers,
                dim=width if entry == "index_kv" else spec.kv_dim(width),
                dtype=dtype if entry == "index_kv" else spec.kv_dtype,
                addressing=entries,
                per_sequence=comp.num_entries(max_length),
                compression=comp,
                packed=packed and entry != "index_kv",
            )
    if spec.head_layers:
        yield PoolSpec(
            name="head_kv",
            num_layers=spec.head_layers,
            dim=spec.kv_dim(spec.head_dim),
            dtype=spec.kv_dtype,
            addressing=ring,
            per_sequence=window,
            shift=spec.head_shift,
            drafted=True,
            packed=packed,
        )
    if spec.head_layers and spec.head_shift:
        yield PoolSpec(
            name="pending_stream",
            num_layers=1,
            dim=spec.num_streams * spec.model_dim,
            dtype=dtype,
            addressing=Addressing.SINGLE,
            per_sequence=1,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """How large a cache is; nodes are counted for all sequences together.

    max_nodes: nodes of one verify. prefill_chunk: tokens of one forward of a prefill. max_draft_nodes: nodes that a
    draft head may process in a round. Raises ValueError for a size below 1.
    """

    batch_size: int
    max_length: int
    max_nodes: int
    prefill_chunk: int
    max_draft_nodes: int

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_length", "max_nodes", "prefill_chunk", "max_draft_nodes"):
            if getattr(self, name) < 1:
                raise ValueError(f"A cache needs {name} of at least 1, got {getattr(self, name)}.")

    @property
    def num_slots(self) -> int:
        """Nodes of the largest forward, and slots that a model's own layers have."""
        return max(self.max_nodes, self.prefill_chunk)

    def num_scratch(self, pool: PoolSpec) -> int:
        """Scratch rows of a pool: one a node of the largest forward that writes it."""
        return max(self.num_slots, self.max_draft_nodes) if pool.drafted else self.num_slots

    def nbytes(self, spec: StateSpec) -> int:
        """Bytes of all pools, reserved in full when a cache is made."""
        return self.scratch_nbytes(spec) + sum(
            pool.num_layers * self.batch_size * pool.per_sequence * pool.dim * pool.dtype.itemsize
            for pool in pool_specs(spec, self.max_length)
        )

    def scratch_nbytes(self, spec: StateSpec) -> int:
        """Bytes of the rows of one round's nodes among them."""
        return sum(
            pool.num_layers * self.num_scratch(pool) * pool.dim * pool.dtype.itemsize
            for pool in pool_specs(spec, self.max_length)
        )
