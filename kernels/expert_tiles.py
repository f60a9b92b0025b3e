"""Tokens sorted by expert and cut into tiles, so that a grouped product knows which rows meet which weights.

The number of tiles is fixed by the shapes, so that nothing has to be read back to launch a product: tiles that are not
needed name expert -1.

N = (node, choice) pairs, E = experts, M = tiles
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTiles:
    """order_N: pairs (node * choices + choice), those of an expert together, in order. expert_M: expert of each tile,
    -1 after the last. first_M, end_M: its range in `order_N`, at most `rows` long. All int32.
    """

    order_N: torch.Tensor
    expert_M: torch.Tensor
    first_M: torch.Tensor
    end_M: torch.Tensor
    rows: int


def most_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """Tiles that suffice however the pairs fall on the experts."""
    return min(num_pairs, num_experts) + num_pairs // rows


def expert_tiles(experts_N: torch.Tensor, num_experts: int, rows: int) -> ExpertTiles:
    """Sort the pairs by expert (stable) and cut each expert's into tiles of `rows`; `experts_N` is int64."""
    counts_E = torch.bincount(experts_N, minlength=num_experts)
    tiles_E = (counts_E + rows - 1) // rows
    expert_M = torch.arange(num_experts, device=experts_N.device).repeat_interleave(tiles_E)
    index_M = torch.arange(len(expert_M), device=experts_N.device) - (tiles_E.cumsum(0) - tiles_E)[expert_M]
    ends_E = counts_E.cumsum(0)
    first_M = (ends_E - counts_E)[expert_M] + index_M * rows
    end_M = torch.minimum(first_M + rows, ends_E[expert_M])
    missing = most_tiles(len(experts_N), num_experts, rows) - len(expert_M)
    pad = torch.nn.functional.pad
    return ExpertTiles(
        order_N=experts_N.argsort(stable=True).int(),
        expert_M=pad(expert_M, (0, missing), value=-1).int(),
        first_M=pad(first_M, (0, missing)).int(),
        end_M=pad(end_M, (0, missing)).int(),
        rows=rows,
    )
