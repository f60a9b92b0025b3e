"""The plan of a round whose lengths only the device knows, for trees of a form fixed beforehand.

T = nodes, B = trees
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from compressed_spec.device_trees import DeviceTrees
from compressed_spec.layout import CacheShape, Compression, StateSpec
from compressed_spec.rows import CompressionPlan, Reach

if TYPE_CHECKING:
    from compressed_spec.kernels.row_plan_triton import NodeTable


# Kernels that a plan launches for a model with CSA, whose entries are chosen, and HCA: see tests/test_launches.py.
KERNELS_A_PLAN = 11


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """What `RowPlan` says, in tensors of fixed shape: lists end in -1.

    Of its compressions, `spans` is empty, and `num_visible` is an upper bound. spans: by compression, the same numbers
    as int64 `[B, 4]`, where entries are chosen.
    """

    tokens_T: torch.Tensor
    position_T: torch.Tensor
    sequence_T: torch.Tensor
    window_rows_TW: torch.Tensor
    parent_stream_T: torch.Tensor
    compressions: Mapping[str, CompressionPlan]
    spans: Mapping[str, torch.Tensor]


def make_device_plan(
    spec: StateSpec,
    shape: CacheShape,
    trees: DeviceTrees,
    tokens_T: torch.Tensor,
    sequence_T: torch.Tensor,
    lengths_B: torch.Tensor,
    most_length: int,
) -> DevicePlan:
    """The plan of a round. sequence_T: batch row of each node. lengths_B: committed tokens of every batch row, on the
    device; none above `most_length`.
    """
    from compressed_spec.kernels.row_plan_triton import node_table, window_rows

    first_B, end_B = trees.first_B1[:-1], trees.first_B1[1:]
    nodes = node_table(trees.parents_T, sequence_T, lengths_B, trees.slot_T, trees.longest)
    compressions = {comp.name: _compression(comp, shape, trees, nodes, most_length) for comp in spec.compressions}
    return DevicePlan(
        tokens_T=tokens_T,
        position_T=nodes.position_T,
        sequence_T=sequence_T,
        window_rows_TW=window_rows(nodes, spec.sliding_window, shape.batch_size),
        parent_stream_T=nodes.parent_stream_T,
        compressions=compressions,
        spans={
            name: torch.stack((first_B, end_B, comp.reach.base_T[first_B], comp.reach.count_T[first_B]), dim=1)
            for name, comp in compressions.items()
            if comp.listed_TK is None
        },
    )


def _compression(
    comp: Compression, shape: CacheShape, trees: DeviceTrees, nodes: "NodeTable", most_length: int
) -> CompressionPlan:
    from compressed_spec.kernels.row_plan_triton import compression_table

    most_visible = comp.num_entries(min(most_length + trees.longest, shape.max_length))
    chosen = bool(comp.index_topk) and most_visible > comp.index_topk
    table = compression_table(
        nodes,
        ratio=comp.ratio,
        span=comp.span,
        per_sequence=comp.num_entries(shape.max_length),
        batch_size=shape.batch_size,
        num_closing=trees.num_closing[comp.name],
        num_listed=0 if chosen else most_visible,
    )
    return CompressionPlan(
        pool_rows_CS=table.pool_rows_CS,
        closing_slot_C=table.closing_slot_C,
        entry_position_C=table.entry_position_C,
        phase_T=table.phase_T,
        spans=(),
        reach=Reach(
            base_T=table.base_T,
            count_T=table.count_T,
            extra_rows_TX=table.extra_rows_TX,
            entry_N=table.base_T.new_empty(0),  # the kernels count entries by themselves
        ),
        num_visible=most_visible,
        listed_TK=None if chosen else table.listed_TK,
    )
