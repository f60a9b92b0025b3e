"""`expert_tiles` in one launch, without reading anything back.

A pair's place is the number of pairs that go before it: quadratic, but a round has a few thousand pairs at most.

N = (node, choice) pairs, E = experts, M = tiles
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from compressed_spec.kernels.expert_tiles import ExpertTiles, most_tiles

PAIR_BLOCK = 32
LIST_BLOCK = 256
TILE_BLOCK = 16


@triton.jit
def expert_tiles_kernel(
    p_experts,
    p_order,
    p_expert,
    p_first,
    p_end,
    num_pairs,
    num_tiles,
    num_experts: tl.constexpr,
    rows: tl.constexpr,
    E_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    LIST: tl.constexpr,
    TILES: tl.constexpr,
):
    """Programs 0 .. place PAIRS pairs each; those after them describe TILES tiles each."""
    pid = tl.program_id(0)
    num_placing = tl.cdiv(num_pairs, PAIRS)
    if pid < num_placing:
        pair = pid * PAIRS + tl.arange(0, PAIRS)
        mine = tl.load(p_experts + pair, mask=pair < num_pairs, other=num_experts).to(tl.int32)
        place = tl.zeros([PAIRS], tl.int32)
        for start in range(0, num_pairs, LIST):
            other = start + tl.arange(0, LIST)
            theirs = tl.load(p_experts + other, mask=other < num_pairs, other=num_experts).to(tl.int32)
            earlier = (theirs[None, :] == mine[:, None]) & (other[None, :] < pair[:, None])
            place += tl.sum((earlier | (theirs[None, :] < mine[:, None])).to(tl.int32), axis=1)
        tl.store(p_order + place, pair, mask=pair < num_pairs)
    else:
        expert = tl.arange(0, E_BLOCK)
        counts = tl.zeros([E_BLOCK], tl.int32)
        for start in range(0, num_pairs, LIST):
            other = start + tl.arange(0, LIST)
            theirs = tl.load(p_experts + other, mask=other < num_pairs, other=num_experts)
            counts += tl.histogram(theirs.to(tl.int32), E_BLOCK)
        counts = tl.where(expert < num_experts, counts, 0)
        ends = tl.cumsum(counts, 0)
        tiles = (counts + rows - 1) // rows
        tile_ends = tl.cumsum(tiles, 0)
        tile = (pid - num_placing) * TILES + tl.arange(0, TILES)
        # The tile's expert is the one in whose range of tiles it lies; one-hot sums read its numbers.
        owns = (tile[:, None] >= (tile_ends - tiles)[None, :]) & (tile[:, None] < tile_ends[None, :])
        owner = tl.sum(tl.where(owns, expert[None, :] + 1, 0), axis=1) - 1
        start_tile = tl.sum(tl.where(owns, (tile_ends - tiles)[None, :], 0), axis=1)
        start_row = tl.sum(tl.where(owns, (ends - counts)[None, :], 0), axis=1)
        end_row = tl.sum(tl.where(owns, ends[None, :], 0), axis=1)
        first = tl.where(owner < 0, 0, start_row + (tile - start_tile) * rows)
        there = tile < num_tiles
        tl.store(p_expert + tile, owner, mask=there)
        tl.store(p_first + tile, first, mask=there)
        tl.store(p_end + tile, tl.minimum(first + rows, end_row), mask=there)


def expert_tiles_config(num_experts: int, rows: int) -> dict[str, int]:
    """Constants of the kernel."""
    return {
        "num_experts": num_experts,
        "rows": rows,
        "E_BLOCK": triton.next_power_of_2(num_experts + 1),  # one more bin for the list's padding
        "PAIRS": PAIR_BLOCK,
        "LIST": LIST_BLOCK,
        "TILES": TILE_BLOCK,
    }


def expert_tiles(experts_N: torch.Tensor, num_experts: int, rows: int) -> ExpertTiles:
    """See `kernels.expert_tiles`."""
    num_pairs = len(experts_N)
    num_tiles = most_tiles(num_pairs, num_experts, rows)
    order_N = torch.empty(num_pairs, dtype=torch.int32, device=experts_N.device)
    expert_M, first_M, end_M = torch.empty(3, num_tiles, dtype=torch.int32, device=experts_N.device)
    grid = (triton.cdiv(num_pairs, PAIR_BLOCK) + triton.cdiv(num_tiles, TILE_BLOCK),)
    expert_tiles_kernel[grid](
        experts_N,
        order_N,
        expert_M,
        first_M,
        end_M,
        num_pairs,
        num_tiles,
        **expert_tiles_config(num_experts, rows),
    )
    return ExpertTiles(order_N=order_N, expert_M=expert_M, first_M=first_M, end_M=end_M, rows=rows)
