"""Products with block-scaled FP8 weights that are decoded on the way, in one launch, or two where the sum is split.

Few rows meet many weights, so the weights are the rows of each product and the rows its columns. A step is one column
block or less, so that its scale multiplies a float32 sum. Where too few tiles would leave the chip idle, the columns
are split among programs and the parts are added in order.

T = rows of x, D = input width, O = output width, G = groups
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from compressed_spec.kernels.fp8_linear import FP8Weight
from compressed_spec.kernels.sum_parts_triton import sum_parts
from compressed_spec.kernels.weight_products_triton import e4m3_product

ENOUGH_PROGRAMS = 256  # about two a multiprocessor of the chips in question
MOST_SPLITS = 8


@triton.jit
def fp8_linear_kernel(
    p_x,
    p_words,
    p_scale,
    p_out,
    num_rows,
    D: tl.constexpr,
    GROUP_OUT: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """out[t, split, group, o] = the split's share of weight[group, o] . x[t, group]; x is [T, G, D]."""
    TILES: tl.constexpr = (GROUP_OUT + OUT - 1) // OUT
    STEPS: tl.constexpr = (D + CHANNELS - 1) // CHANNELS
    group, tile, split = tl.program_id(0) // TILES, tl.program_id(0) % TILES, tl.program_id(2)
    out = tile * OUT + tl.arange(0, OUT)
    out_row = group * GROUP_OUT + out
    inside = out < GROUP_OUT
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    there = row < num_rows
    x_row = (row.to(tl.int64) * NUM_GROUPS + group) * D
    word, channel = tl.arange(0, CHANNELS // 4), tl.arange(0, CHANNELS)
    num_scales: tl.constexpr = (D + BLOCK_IN - 1) // BLOCK_IN
    acc = tl.zeros([OUT, ROWS], tl.float32)
    share: tl.constexpr = (STEPS + SPLITS - 1) // SPLITS
    for step in range(split * share, tl.minimum(split * share + share, STEPS)):
        start = step * CHANNELS
        x = tl.load(
            p_x + x_row[:, None] + (start + channel)[None, :],
            mask=there[:, None] & (start + channel < D)[None, :],
            other=0.0,
        )
        words = tl.load(
            p_words + out_row.to(tl.int64)[:, None] * (D // 4) + (start // 4 + word)[None, :],
            mask=inside[:, None] & (start // 4 + word < D // 4)[None, :],
            other=0,
        )
        scale = tl.load(p_scale + out_row // BLOCK_OUT * num_scales + start // BLOCK_IN, mask=inside, other=0)
        acc = e4m3_product(acc, words, scale, x)
    out_place = (row.to(tl.int64) * SPLITS + split) * (NUM_GROUPS * GROUP_OUT)
    tl.store(
        p_out + out_place[None, :] + out_row[:, None],
        acc.to(p_out.dtype.element_ty),
        mask=inside[:, None] & there[None, :],
    )


def fp8_linear_config(num_rows: int, group_out: int, num_groups: int, width: int, block_in: int) -> dict[str, int]:
    """Tile of OUT x CHANNELS weights by ROWS rows, and SPLITS of the columns."""
    rows = min(max(triton.next_power_of_2(num_rows), 16), 64)
    out = 64 if rows < 64 else 128
    channels = min(128, block_in)
    programs = triton.cdiv(group_out, out) * num_groups * triton.cdiv(num_rows, rows)
    splits = min(triton.cdiv(ENOUGH_PROGRAMS, programs), MOST_SPLITS, triton.cdiv(width, 2 * channels))
    compiler = {"num_warps": 4, "num_stages": 4} if rows < 64 else {"num_warps": 8, "num_stages": 3}
    return {"SPLITS": splits, "ROWS": rows, "OUT": out, "CHANNELS": channels, **compiler}


def fp8_linear(x_TD: torch.Tensor, weight: FP8Weight) -> torch.Tensor:
    """See `kernels.fp8_linear`; x is float32, float16 or bfloat16."""
    return _product(x_TD.reshape(-1, 1, x_TD.shape[-1]), weight).view(*x_TD.shape[:-1], -1)


def fp8_grouped_linear(x_TGD: torch.Tensor, weight: FP8Weight) -> torch.Tensor:
    """See `kernels.fp8_linear`; x is float32, float16 or bfloat16."""
    return _product(x_TGD, weight).view(*x_TGD.shape[:2], -1)


def _product(x_TGD: torch.Tensor, weight: FP8Weight) -> torch.Tensor:
    num_rows, num_groups, width = x_TGD.shape
    num_out = weight.codes.shape[0]
    block_out, block_in = weight.block
    assert width % 4 == 0, "a word holds four columns"
    assert block_in % 64 == 0, "a step of 64 or 128 columns has one scale"
    config = fp8_linear_config(num_rows, num_out // num_groups, num_groups, width, block_in)
    splits = config["SPLITS"]
    dtype = x_TGD.dtype if splits == 1 else torch.float32
    out_TSO = torch.empty((num_rows, splits, num_out), dtype=dtype, device=x_TGD.device)
    tiles = triton.cdiv(num_out // num_groups, config["OUT"]) * num_groups
    scale = weight.scale if weight.scale.dtype == torch.float32 else weight.scale.view(torch.uint8)
    fp8_linear_kernel[(tiles, triton.cdiv(num_rows, config["ROWS"]), splits)](
        x_TGD.contiguous(),
        weight.codes.contiguous().view(torch.uint32),
        scale.contiguous(),
        out_TSO,
        num_rows,
        D=width,
        GROUP_OUT=num_out // num_groups,
        NUM_GROUPS=num_groups,
        BLOCK_OUT=block_out,
        BLOCK_IN=block_in,
        **config,
    )
    return out_TSO[:, 0] if splits == 1 else sum_parts(out_TSO, x_TGD.dtype)
