"""Commit without knowing what was accepted: which rows move where, worked out beside the pools, and moved.

B = trees, A = longest path, N = B A entries of all paths, T = nodes, M = ways of addressing, L = layers, R = pool rows,
D = row width
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

RING, ENTRIES, SINGLE = 0, 1, 2  # by position, by index of the compressed entry, the newest only


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """How the rows of some pools are found: `kind` is RING, ENTRIES or SINGLE.

    per_sequence: persistent rows of a sequence. shift: from a node's position to its row's. ratio: tokens an entry
    stands for, 1 where there are none. num_persistent: rows before the scratch rows.
    """

    kind: int
    per_sequence: int
    shift: int
    ratio: int
    num_persistent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Moves:
    """Rows to copy, int64 `[M, N]`: `target[m, n]` becomes what `source[m, n]` holds; source -1 moves nothing."""

    source_MN: torch.Tensor
    target_MN: torch.Tensor


MoveRows = Callable[[Sequence[torch.Tensor], Sequence[int], Moves], None]  # as `commit_rows` below


def lane_table(lanes: Sequence[Lane], device: torch.device) -> torch.Tensor:
    """Lanes as int64 `[M, 5]`, in the order of their fields."""
    fields = [[lane.kind, lane.per_sequence, lane.shift, lane.ratio, lane.num_persistent] for lane in lanes]
    return torch.tensor(fields, dtype=torch.int64, device=device)


def commit_moves(
    path_BA: torch.Tensor,
    position_T: torch.Tensor,
    sequence_T: torch.Tensor,
    slot_T: torch.Tensor,
    lanes_M5: torch.Tensor,
) -> Moves:
    """The moves that accept one path a tree: node ids `path_BA`, root first, -1 after the last (all int64)."""
    node_BA = path_BA.clamp(min=0)
    count_B1 = (path_BA >= 0).sum(1, keepdim=True)
    place_BA = torch.arange(path_BA.shape[1], device=path_BA.device).expand_as(path_BA)
    sequence_BA, slot_BA = sequence_T[node_BA], slot_T[node_BA]
    sources, targets = [], []
    for kind, per_sequence, shift, ratio, num_persistent in lanes_M5.tolist():
        position_BA = position_T[node_BA] + shift
        if kind == RING:
            # A path longer than the ring leaves only its last rows.
            keep_BA, row_BA = (place_BA >= count_B1 - per_sequence) & (position_BA >= 0), position_BA % per_sequence
        elif kind == ENTRIES:
            keep_BA, row_BA = (position_BA + 1) % ratio == 0, position_BA // ratio
        else:
            keep_BA, row_BA = place_BA == count_B1 - 1, torch.zeros_like(position_BA)
        keep_BA = keep_BA & (path_BA >= 0)
        sources.append(torch.where(keep_BA, num_persistent + slot_BA, -1).flatten())
        targets.append(torch.where(keep_BA, sequence_BA * per_sequence + row_BA, -1).flatten())
    return Moves(source_MN=torch.stack(sources), target_MN=torch.stack(targets))


def commit_rows(pools: Sequence[torch.Tensor], lane_of: Sequence[int], moves: Moves) -> None:
    """Move the rows of every layer of pools `[L, R, D]`; `lane_of[i]` is pool i's row of the moves."""
    for pool_LRD, lane in zip(pools, lane_of, strict=True):
        there_N = moves.source_MN[lane] >= 0
        pool_LRD[:, moves.target_MN[lane][there_N]] = pool_LRD[:, moves.source_MN[lane][there_N]]
