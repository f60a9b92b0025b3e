"""The row plan: which rows each node of a round reads and writes. Made once a round, shared by all layers.

It is made of host numbers (lengths and trees are known there) with numpy and moved to the device in one go, because a
few dozen torch operations on tiny tensors cost more than the whole plan does in numpy.

A node's slot is its scratch row in every pool; usually its flat index.

T = nodes, A = deepest path, W = window, C = nodes that close a compressed window, S = tokens one entry pools,
X = entries closed by a node's own ancestors in this round, K = entries a node lists
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from compressed_spec.layout import CacheShape, Compression, StateSpec
from compressed_spec.tree import TokenTree

Ints = NDArray[np.int64]

MIN_COLUMNS = 2  # of a list: the rows of a narrower one have no stride that compiled code could rely on


@dataclass(frozen=True, slots=True, kw_only=True)
class Nodes:
    """Nodes of a forest, flat, those of a sequence together. Their ancestors need not be among them.

    start_T: committed length of a node's sequence; the root lies at it. ancestors_TA: `[t, d]` is the slot of t's
    ancestor at depth d (its own at its own depth, -1 beyond).
    """

    sequence_T: Ints
    start_T: Ints
    depth_T: Ints
    ancestors_TA: Ints

    @property
    def position_T(self) -> Ints:
        return self.start_T + self.depth_T

    @property
    def slot_T(self) -> Ints:
        return self.ancestors_TA[np.arange(len(self.depth_T)), self.depth_T]

    def take(self, index: Ints | NDArray[np.bool_]) -> "Nodes":
        """Some of them, by flat index or by mask."""
        return Nodes(
            sequence_T=self.sequence_T[index],
            start_T=self.start_T[index],
            depth_T=self.depth_T[index],
            ancestors_TA=self.ancestors_TA[index],
        )

    def at(self, slots: Ints) -> "Nodes":
        """The nodes of whole trees, in these slots instead of their flat indices."""
        return replace(self, ancestors_TA=np.where(self.ancestors_TA < 0, -1, slots[self.ancestors_TA]))


def columns(array_TA: Ints, index_TX: Ints) -> Ints:
    """Each row's own columns `[T, X]`: np.take_along_axis, at a third of its cost for a few rows."""
    return array_TA[np.arange(len(array_TA))[:, None], index_TX]


def _between(array: Ints, most: int) -> Ints:
    """At least 0 and at most `most`: np.clip, at a fifth of its cost for a few numbers."""
    result: Ints = np.minimum(np.maximum(array, 0), most)
    return result


def locate(nodes: Nodes, positions_TX: Ints, ring: int, num_persistent: int) -> Ints:
    """Rows that hold these positions as each node sees them: ring rows if committed, else the ancestor's scratch row.

    A negative position is -1.
    """
    depth_TX = positions_TX - nodes.start_T[:, None]
    ancestors_TX = columns(nodes.ancestors_TA, _between(depth_TX, nodes.ancestors_TA.shape[1] - 1))
    committed_TX = nodes.sequence_T[:, None] * ring + positions_TX % ring
    rows_TX = np.where(depth_TX < 0, committed_TX, num_persistent + ancestors_TX)
    return np.where(positions_TX < 0, -1, rows_TX)


def window_rows(nodes: Nodes, window: int, batch_size: int) -> Ints:
    """Rows of each node's sliding window, in the canonical order of ring slots, `[T, W]`."""
    position_T1 = nodes.position_T[:, None]
    positions_TW = position_T1 - (position_T1 - np.arange(window)) % window
    return locate(nodes, positions_TW, window, batch_size * window)


def flatten(trees: Sequence[TokenTree], sequences: Sequence[int], starts: Sequence[int]) -> Nodes:
    """The nodes of one tree a sequence, trees one after the other; slot = flat index."""
    sizes = [len(tree) for tree in trees]
    depth_T = np.concatenate([_depths(tree) for tree in trees])
    ancestors_TA = np.full((len(depth_T), int(depth_T.max()) + 1), -1, dtype=np.int64)
    first = 0
    for tree, size in zip(trees, sizes, strict=True):
        block = ancestors_TA[first : first + size]
        if _is_chain(tree):
            # The closed form, since a chunk of a prompt may be hundreds of nodes deep.
            depth = np.arange(size)
            block[:, :size] = np.where(depth <= depth[:, None], first + depth, -1)
        else:
            for node, parent in enumerate(tree.parents):
                if node:
                    block[node] = block[parent]
                block[node, depth_T[first + node]] = first + node
        first += size
    return Nodes(
        sequence_T=np.repeat(np.array(sequences, dtype=np.int64), sizes),
        start_T=np.repeat(np.array(starts, dtype=np.int64), sizes),
        depth_T=depth_T,
        ancestors_TA=ancestors_TA,
    )


def _is_chain(tree: TokenTree) -> bool:
    return tree.parents[-1] == len(tree) - 2 and tree.parents == tuple(range(-1, len(tree) - 1))


def _depths(tree: TokenTree) -> Ints:
    return np.arange(len(tree)) if _is_chain(tree) else np.array(tree.depths, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The entries in each node's sight: the `count` committed ones from row `base` on, then its own.

    extra_rows_TX: rows of the entries that its ancestors closed in this round, -1 = nothing. entry_N: 0 .. of the
    entries that any node sees, empty where they are listed anyway.
    """

    base_T: torch.Tensor
    count_T: torch.Tensor
    extra_rows_TX: torch.Tensor
    entry_N: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionPlan:
    """Rows of one compression.

    pool_rows_CS: raw rows that each closing node pools. closing_slot_C: its slot, where the new entry goes.
    entry_position_C: RoPE position of the entry.
    phase_T: position bias of each node's raw row. spans, reach: what a node may score (see kernels.indexer).
    listed_TK: all visible entries' rows, ascending; None when the indexer must choose among `num_visible`.
    """

    pool_rows_CS: torch.Tensor
    closing_slot_C: torch.Tensor
    entry_position_C: torch.Tensor
    phase_T: torch.Tensor
    spans: tuple[tuple[int, int, int, int], ...]
    reach: Reach
    num_visible: int
    listed_TK: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPlan:
    """All that one forward needs to know of where its nodes' state lies.

    parent_stream_T: row of the stream that precedes each node (its parent's, or the sequence's pending one).
    slot_T: where the nodes' rows go, None for slots 0 .. T.
    """

    nodes: Nodes
    tokens_T: torch.Tensor
    position_T: torch.Tensor
    window_rows_TW: torch.Tensor
    parent_stream_T: torch.Tensor
    compressions: dict[str, CompressionPlan]
    slot_T: torch.Tensor | None


def _to_device(array: Ints, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def _plan_compression(
    nodes: Nodes, comp: Compression, shape: CacheShape, ends: Ints, device: torch.device
) -> CompressionPlan:
    position_T, ratio, per_sequence = nodes.position_T, comp.ratio, comp.num_entries(shape.max_length)
    seen_T = position_T + 1
    phase_T = position_T % ratio
    closer_C = np.flatnonzero(phase_T == ratio - 1)
    closing_slot_C, closing_end_C = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    pool_rows_CS = np.empty((0, comp.span), dtype=np.int64)
    if len(closer_C):
        closers = nodes.take(closer_C)
        closing_slot_C, closing_end_C = closers.slot_T, seen_T[closer_C]
        span_CS = closing_end_C[:, None] + np.arange(-comp.span, 0)
        pool_rows_CS = locate(closers, span_CS, comp.span, shape.batch_size * comp.span)
    base_T, count_T = nodes.sequence_T * per_sequence, nodes.start_T // ratio
    visible_T = seen_T // ratio
    num_visible = int(visible_T.max())

    # Entry count + x was closed by the ancestor at its last position, and lies in that ancestor's slot.
    count_T1 = count_T[:, None]
    entry_TX = count_T1 + np.arange(max(MIN_COLUMNS, int((visible_T - count_T).max())))
    depth_TX = (entry_TX + 1) * ratio - (nodes.start_T[:, None] + 1)
    closer_TX = columns(nodes.ancestors_TA, _between(depth_TX, nodes.ancestors_TA.shape[1] - 1))
    extra_TX = np.where(entry_TX < visible_T[:, None], shape.batch_size * per_sequence + closer_TX, -1)

    listed_TK = None
    if not comp.index_topk or num_visible <= comp.index_topk:
        entry_K = np.arange(max(MIN_COLUMNS, num_visible))
        own_TK = columns(extra_TX, _between(entry_K - count_T1, entry_TX.shape[1] - 1))
        listed_TK = np.where(entry_K < count_T1, base_T[:, None] + entry_K, own_TK)
        listed_TK = np.where(entry_K < visible_T[:, None], listed_TK, -1)

    return CompressionPlan(
        pool_rows_CS=_to_device(pool_rows_CS, device),
        closing_slot_C=_to_device(closing_slot_C, device),
        entry_position_C=_to_device(closing_end_C - ratio, device),
        phase_T=_to_device(phase_T, device),
        spans=tuple(
            (int(first), int(end), int(base_T[first]), int(count_T[first]))
            for first, end in zip([0, *ends[:-1]], ends, strict=True)
        ),
        reach=Reach(
            base_T=_to_device(base_T, device),
            count_T=_to_device(count_T, device),
            extra_rows_TX=_to_device(extra_TX, device),
            entry_N=_to_device(np.arange(num_visible if listed_TK is None else 0), device),
        ),
        num_visible=num_visible,
        listed_TK=None if listed_TK is None else _to_device(listed_TK, device),
    )


def selected_rows(reach: Reach, entries_TK: torch.Tensor) -> torch.Tensor:
    """Rows of entries, by index: committed ones from the base on, later ones the node's own. -1 where it sees none."""
    own_TK, num_extra = entries_TK - reach.count_T.unsqueeze(1), reach.extra_rows_TX.shape[1]
    rows_TK = reach.base_T.unsqueeze(1) + entries_TK
    extra_TK = reach.extra_rows_TX.gather(1, own_TK.clamp(min=0).clamp(max=num_extra - 1))
    rows_TK = torch.where(own_TK < 0, rows_TK, extra_TK)
    return torch.where((entries_TK < 0) | (own_TK >= num_extra), -1, rows_TK)


def make_plan(
    spec: StateSpec,
    shape: CacheShape,
    trees: Sequence[TokenTree],
    sequences: Sequence[int],
    starts: Sequence[int],
    device: torch.device,
    *,
    slots: Ints | None = None,
) -> RowPlan:
    """The plan of one round: `trees[i]` grows from sequence `sequences[i]`, whose committed length is `starts[i]`.

    slots: of all nodes, trees one after the other; by default a node's flat index.
    """
    nodes = flatten(trees, sequences, starts)
    tokens_T = np.array([token for tree in trees for token in tree.tokens], dtype=np.int64)
    return plan_nodes(spec, shape, nodes if slots is None else nodes.at(slots), tokens_T, device)


def plan_nodes(spec: StateSpec, shape: CacheShape, nodes: Nodes, tokens_T: Ints, device: torch.device) -> RowPlan:
    """The plan of a forward over any nodes; ancestors that are not among them have been through it before."""
    position_T, slot_T, depth_T = nodes.position_T, nodes.slot_T, nodes.depth_T
    parent_T = nodes.ancestors_TA[np.arange(len(depth_T)), np.maximum(depth_T - 1, 0)]
    parent_stream_T = np.where(depth_T > 0, shape.batch_size + parent_T, nodes.sequence_T)
    ends = np.array([*np.flatnonzero(nodes.sequence_T[1:] != nodes.sequence_T[:-1]) + 1, len(depth_T)])
    in_order = bool((slot_T == np.arange(len(slot_T))).all())
    return RowPlan(
        nodes=nodes,
        tokens_T=_to_device(tokens_T, device),
        position_T=_to_device(position_T, device),
        window_rows_TW=_to_device(window_rows(nodes, spec.sliding_window, shape.batch_size), device),
        parent_stream_T=_to_device(parent_stream_T, device),
        compressions={comp.name: _plan_compression(nodes, comp, shape, ends, device) for comp in spec.compressions},
        slot_T=None if in_order else _to_device(slot_T, device),
    )
