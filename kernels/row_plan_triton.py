"""The row plan of a round, made where it is used. `compressed_spec.rows.make_plan` is its reference.

Shapes may not depend on lengths, so lists have the length that suffices for the trees, and end in -1: closing nodes,
entries closed in this round, entries listed. Everything is int64.

T = nodes, A = deepest path, W = window, C = most closing nodes, S = tokens one entry pools, X = most entries closed by
a node's own ancestors, K = most entries listed, B = sequences
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

NODE_BLOCK = 64
COLUMN_BLOCK = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeTable:
    """Where each node is: as `rows.Nodes` and `RowPlan` have it."""

    sequence_T: torch.Tensor
    start_T: torch.Tensor
    position_T: torch.Tensor
    slot_T: torch.Tensor
    ancestors_TA: torch.Tensor
    parent_stream_T: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionTable:
    """As `rows.CompressionPlan`; visible_T: entries that each node sees. listed_TK has no columns if K is 0."""

    pool_rows_CS: torch.Tensor
    closing_slot_C: torch.Tensor
    entry_position_C: torch.Tensor
    phase_T: torch.Tensor
    base_T: torch.Tensor
    count_T: torch.Tensor
    visible_T: torch.Tensor
    extra_rows_TX: torch.Tensor
    listed_TK: torch.Tensor


@triton.jit
def node_table_kernel(
    p_parents,
    p_sequence,
    p_lengths,
    p_slot,
    p_start,
    p_position,
    p_ancestors,
    p_stream,
    num_nodes,
    deepest,
    batch_size,
    BLOCK: tl.constexpr,
):
    node = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = node < num_nodes
    depth = tl.zeros([BLOCK], tl.int64)
    ancestor = tl.where(there, node.to(tl.int64), -1)
    for _ in range(0, deepest):
        ancestor = tl.load(p_parents + ancestor, mask=ancestor >= 0, other=-1)
        depth += (ancestor >= 0).to(tl.int64)
    ancestor = tl.where(there, node.to(tl.int64), -1)
    for step in range(0, deepest):
        slot = tl.load(p_slot + ancestor, mask=ancestor >= 0, other=-1)
        # Column depth - step goes to an ancestor, the one `step` beyond the node's own to nobody.
        tl.store(p_ancestors + node * deepest + depth - step, slot, mask=ancestor >= 0)
        tl.store(p_ancestors + node * deepest + depth + 1 + step, -1, mask=there & (depth + 1 + step < deepest))
        ancestor = tl.load(p_parents + ancestor, mask=ancestor >= 0, other=-1)
    sequence = tl.load(p_sequence + node, mask=there, other=0)
    start = tl.load(p_lengths + sequence, mask=there, other=0)
    parent = tl.load(p_parents + node, mask=there, other=-1)
    parent_slot = tl.load(p_slot + parent, mask=parent >= 0, other=0)
    tl.store(p_start + node, start, mask=there)
    tl.store(p_position + node, start + depth, mask=there)
    tl.store(p_stream + node, tl.where(parent < 0, sequence, batch_size + parent_slot), mask=there)


@triton.jit
def _locate(position, sequence, start, p_ancestors, deepest, ring, num_persistent, mask):
    """Row that holds a position as the node sees it whose ancestors these are; -1 for a negative position."""
    depth = position - start
    committed = sequence * ring + position % ring
    ancestor = tl.load(p_ancestors + depth, mask=mask & (depth >= 0) & (depth < deepest), other=0)
    return tl.where(position < 0, -1, tl.where(depth < 0, committed, num_persistent + ancestor))


@triton.jit
def window_rows_kernel(
    p_sequence, p_start, p_position, p_ancestors, p_rows, deepest, window, batch_size, BLOCK: tl.constexpr
):
    node = tl.program_id(0)
    slot = tl.arange(0, BLOCK)
    position = tl.load(p_position + node)
    behind = (position - slot) % window
    behind = tl.where(behind < 0, behind + window, behind)
    row = _locate(
        position - behind,
        tl.load(p_sequence + node),
        tl.load(p_start + node),
        p_ancestors + node * deepest,
        deepest,
        window,
        batch_size * window,
        slot < window,
    )
    tl.store(p_rows + node * window + slot, row, mask=slot < window)


@triton.jit
def closing_rows_kernel(
    p_sequence,
    p_start,
    p_position,
    p_slot,
    p_ancestors,
    p_pool_rows,
    p_closing_slot,
    p_entry_position,
    num_nodes,
    deepest,
    ratio,
    span,
    batch_size,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Closing node number c of all, in their order: the rows that it pools."""
    number = tl.program_id(0)
    every = tl.arange(0, NODES)
    closes = (tl.load(p_position + every, mask=every < num_nodes, other=0) + 1) % ratio == 0
    closes = (closes & (every < num_nodes)).to(tl.int32)
    node = tl.sum(tl.where((closes > 0) & (tl.cumsum(closes, 0) == number + 1), every + 1, 0), 0) - 1
    found = node >= 0
    node = tl.maximum(node, 0)
    position = tl.load(p_position + node)
    column = tl.arange(0, BLOCK)
    row = _locate(
        position + 1 - span + column,
        tl.load(p_sequence + node),
        tl.load(p_start + node),
        p_ancestors + node * deepest,
        deepest,
        span,
        batch_size * span,
        column < span,
    )
    tl.store(p_pool_rows + number * span + column, tl.where(found, row, -1), mask=column < span)
    tl.store(p_closing_slot + number, tl.where(found, tl.load(p_slot + node), -1))
    tl.store(p_entry_position + number, tl.where(found, position + 1 - ratio, -1))


@triton.jit
def _own_entry(entry, start, visible, p_ancestors, deepest, ratio, num_persistent, mask):
    """Row of an entry that an ancestor closed in this round (it lies at the ancestor's slot), -1 if not visible."""
    depth = (entry + 1) * ratio - 1 - start
    closer = tl.load(p_ancestors + depth, mask=mask & (entry < visible) & (depth >= 0), other=0)
    return tl.where(entry < visible, num_persistent + closer, -1)


@triton.jit
def entry_rows_kernel(
    p_sequence,
    p_start,
    p_position,
    p_ancestors,
    p_phase,
    p_base,
    p_count,
    p_visible,
    p_extra,
    p_listed,
    deepest,
    ratio,
    per_sequence,
    batch_size,
    num_extra,
    num_listed,
    EXTRA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A node's entries: those closed in this round, then a block of all that it sees."""
    node = tl.program_id(0)
    position, start = tl.load(p_position + node), tl.load(p_start + node)
    base = tl.load(p_sequence + node) * per_sequence
    count, visible = start // ratio, (position + 1) // ratio
    ancestors, num_persistent = p_ancestors + node * deepest, batch_size * per_sequence
    if tl.program_id(1) == 0:
        tl.store(p_phase + node, position % ratio)
        tl.store(p_base + node, base)
        tl.store(p_count + node, count)
        tl.store(p_visible + node, visible)
        extra = tl.arange(0, EXTRA)
        mine = extra < num_extra
        row = _own_entry(count + extra, start, visible, ancestors, deepest, ratio, num_persistent, mine)
        tl.store(p_extra + node * num_extra + extra, row, mask=mine)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    listed = entry < num_listed
    own = _own_entry(entry, start, visible, ancestors, deepest, ratio, num_persistent, listed & (entry >= count))
    tl.store(p_listed + node.to(tl.int64) * num_listed + entry, tl.where(entry < count, base + entry, own), mask=listed)


def node_table(
    parents_T: torch.Tensor, sequence_T: torch.Tensor, lengths_B: torch.Tensor, slot_T: torch.Tensor, deepest: int
) -> NodeTable:
    """Nodes of a forest, flat: `parents_T` are flat indices, -1 for roots; `deepest` is A, nodes of the longest path.

    lengths_B: committed length of each sequence. slot_T: scratch row of each node.
    """
    num_nodes = len(parents_T)
    start_T, position_T, stream_T = parents_T.new_empty((3, num_nodes)).unbind()
    ancestors_TA = parents_T.new_empty((num_nodes, deepest))
    node_table_kernel[(triton.cdiv(num_nodes, NODE_BLOCK),)](
        parents_T,
        sequence_T,
        lengths_B,
        slot_T,
        start_T,
        position_T,
        ancestors_TA,
        stream_T,
        num_nodes,
        deepest,
        len(lengths_B),
        BLOCK=NODE_BLOCK,
    )
    return NodeTable(
        sequence_T=sequence_T,
        start_T=start_T,
        position_T=position_T,
        slot_T=slot_T,
        ancestors_TA=ancestors_TA,
        parent_stream_T=stream_T,
    )


def window_rows(nodes: NodeTable, window: int, batch_size: int) -> torch.Tensor:
    """Rows of each node's sliding window, `[T, W]`, as `rows.window_rows`."""
    num_nodes, deepest = nodes.ancestors_TA.shape
    rows_TW = nodes.position_T.new_empty((num_nodes, window))
    window_rows_kernel[(num_nodes,)](
        nodes.sequence_T,
        nodes.start_T,
        nodes.position_T,
        nodes.ancestors_TA,
        rows_TW,
        deepest,
        window,
        batch_size,
        BLOCK=triton.next_power_of_2(window),
    )
    return rows_TW


def compression_table(
    nodes: NodeTable,
    *,
    ratio: int,
    span: int,
    per_sequence: int,
    batch_size: int,
    num_closing: int,
    num_listed: int,
) -> CompressionTable:
    """Rows of one compression; `per_sequence` entries a sequence, C = `num_closing`, K = `num_listed`."""
    num_nodes, deepest = nodes.ancestors_TA.shape
    new = nodes.position_T.new_empty
    num_extra = (deepest + ratio - 1) // ratio
    pool_rows_CS, closing_slot_C, entry_position_C = new((num_closing, span)), new(num_closing), new(num_closing)
    if num_closing:
        closing_rows_kernel[(num_closing,)](
            nodes.sequence_T,
            nodes.start_T,
            nodes.position_T,
            nodes.slot_T,
            nodes.ancestors_TA,
            pool_rows_CS,
            closing_slot_C,
            entry_position_C,
            num_nodes,
            deepest,
            ratio,
            span,
            batch_size,
            NODES=triton.next_power_of_2(num_nodes),
            BLOCK=triton.next_power_of_2(span),
        )
    phase_T, base_T, count_T, visible_T = new((4, num_nodes)).unbind()
    extra_rows_TX, listed_TK = new((num_nodes, num_extra)), new((num_nodes, num_listed))
    entry_rows_kernel[(num_nodes, max(triton.cdiv(num_listed, COLUMN_BLOCK), 1))](
        nodes.sequence_T,
        nodes.start_T,
        nodes.position_T,
        nodes.ancestors_TA,
        phase_T,
        base_T,
        count_T,
        visible_T,
        extra_rows_TX,
        listed_TK,
        deepest,
        ratio,
        per_sequence,
        batch_size,
        num_extra,
        num_listed,
        EXTRA=triton.next_power_of_2(num_extra),
        BLOCK=COLUMN_BLOCK,
    )
    return CompressionTable(
        pool_rows_CS=pool_rows_CS,
        closing_slot_C=closing_slot_C,
        entry_position_C=entry_position_C,
        phase_T=phase_T,
        base_T=base_T,
        count_T=count_T,
        visible_T=visible_T,
        extra_rows_TX=extra_rows_TX,
        listed_TK=listed_TK,
    )
