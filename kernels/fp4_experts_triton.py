"""The routed experts over packed FP4 weights: four launches (sort, gate / up, down, sum), nothing read back.

Tokens are few and weights many, so the weights are the rows of each product and the tokens its columns; both nibbles of
a byte meet their own half of the token's channels. Products are in x's dtype with float32 sums.

T = nodes, D = model width, E = experts, F = expert width, K = experts a token, N = (node, choice) pairs
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from compressed_spec.kernels.decode_triton import E2M1_GAIN, e2m1, e8m0
from compressed_spec.kernels.dequantize import FP4_GROUP
from compressed_spec.kernels.expert_tiles_triton import expert_tiles
from compressed_spec.kernels.fp4_experts import PackedExperts
from compressed_spec.kernels.moe import Routing

SUM_BLOCK = 1024


@triton.jit
def _product(acc, packed, scale, x, BITS_ROWS: tl.constexpr, GROUPS: tl.constexpr):
    """acc [O, M] plus FP4 weights (packed [O, C / 2], scale [O, C / 32]) times x [M, C]."""
    gain = e8m0(scale) * E2M1_GAIN
    gain = tl.reshape(tl.broadcast_to(gain[:, :, None], [BITS_ROWS, GROUPS, 16]), [BITS_ROWS, GROUPS * 16])
    code = packed.to(tl.uint16)
    even, odd = tl.split(tl.reshape(x, [x.shape[0], GROUPS * 16, 2]))
    low = (e2m1(code).to(tl.float32) * gain).to(x.dtype)
    high = (e2m1(code >> 4).to(tl.float32) * gain).to(x.dtype)
    acc = tl.dot(low, tl.trans(even), acc, input_precision="ieee")
    return tl.dot(high, tl.trans(odd), acc, input_precision="ieee")


@triton.jit
def gate_up_kernel(
    x_ptr,
    order_ptr,
    weights_ptr,
    expert_ptr,
    first_ptr,
    end_ptr,
    packed_ptr,
    scale_ptr,
    hidden_ptr,
    limit,
    num_chosen: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """hidden[i] = silu(min(gate, limit)) * clamp(up) * routing weight, for the i-th pair in order."""
    tile = tl.program_id(1)
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(first_ptr + tile) + tl.arange(0, ROWS)
    there = place < tl.load(end_ptr + tile)
    pair = tl.load(order_ptr + place, mask=there, other=0)
    x_rows = (pair // num_chosen).to(tl.int64) * D

    out = tl.program_id(0) * OUT + tl.arange(0, OUT)
    inside = (out < F)[:, None]
    gate_row = expert * (2 * F) + out
    byte, group, channel = tl.arange(0, CHANNELS // 2), tl.arange(0, CHANNELS // 32), tl.arange(0, CHANNELS)
    gate = tl.zeros([OUT, ROWS], tl.float32)
    up = tl.zeros([OUT, ROWS], tl.float32)
    for start in range(0, D, CHANNELS):
        x = tl.load(
            x_ptr + x_rows[:, None] + (start + channel)[None, :],
            mask=there[:, None] & (start + channel < D)[None, :],
            other=0.0,
        )
        bytes_there = inside & (start // 2 + byte < D // 2)[None, :]
        groups_there = inside & (start // 32 + group < D // 32)[None, :]
        packed = packed_ptr + gate_row[:, None] * (D // 2) + (start // 2 + byte)[None, :]
        scale = scale_ptr + gate_row[:, None] * (D // 32) + (start // 32 + group)[None, :]
        gate = _product(
            gate,
            tl.load(packed, mask=bytes_there, other=0),
            tl.load(scale, mask=groups_there, other=0),
            x,
            OUT,
            CHANNELS // 32,
        )
        up = _product(
            up,
            tl.load(packed + F * (D // 2), mask=bytes_there, other=0),
            tl.load(scale + F * (D // 32), mask=groups_there, other=0),
            x,
            OUT,
            CHANNELS // 32,
        )
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    weight = tl.load(weights_ptr + pair, mask=there, other=0.0).to(tl.float32)
    hidden = gate / (1.0 + tl.exp(-gate)) * up * weight[None, :]
    tl.store(
        hidden_ptr + place.to(tl.int64)[None, :] * F + out[:, None],
        hidden.to(hidden_ptr.dtype.element_ty),
        mask=inside & there[None, :],
    )


@triton.jit
def down_kernel(
    hidden_ptr,
    order_ptr,
    expert_ptr,
    first_ptr,
    end_ptr,
    packed_ptr,
    scale_ptr,
    choice_ptr,
    D: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """choice[pair] = w2 hidden[i], where pair is the i-th in order: back in the nodes' own order, float32."""
    tile = tl.program_id(1)
    expert = tl.load(expert_ptr + tile).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(first_ptr + tile) + tl.arange(0, ROWS)
    there = place < tl.load(end_ptr + tile)
    pair = tl.load(order_ptr + place, mask=there, other=0).to(tl.int64)
    hidden_rows = place.to(tl.int64) * F

    out = tl.program_id(0) * OUT + tl.arange(0, OUT)
    inside = (out < D)[:, None]
    row = expert * D + out
    byte, group, channel = tl.arange(0, CHANNELS // 2), tl.arange(0, CHANNELS // 32), tl.arange(0, CHANNELS)
    acc = tl.zeros([OUT, ROWS], tl.float32)
    for start in range(0, F, CHANNELS):
        hidden = tl.load(
            hidden_ptr + hidden_rows[:, None] + (start + channel)[None, :],
            mask=there[:, None] & (start + channel < F)[None, :],
            other=0.0,
        )
        packed = packed_ptr + row[:, None] * (F // 2) + (start // 2 + byte)[None, :]
        scale = scale_ptr + row[:, None] * (F // 32) + (start // 32 + group)[None, :]
        acc = _product(
            acc,
            tl.load(packed, mask=inside & (start // 2 + byte < F // 2)[None, :], other=0),
            tl.load(scale, mask=inside & (start // 32 + group < F // 32)[None, :], other=0),
            hidden,
            OUT,
            CHANNELS // 32,
        )
    tl.store(choice_ptr + pair[None, :] * D + out[:, None], acc, mask=inside & there[None, :])


@triton.jit
def sum_choices_kernel(choice_ptr, output_ptr, num_chosen: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """output[t] = the sum of choice[t, k], k ascending."""
    node = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(choice_ptr + node * num_chosen * D + channel, mask=channel < D, other=0.0)
    for k in range(1, num_chosen):
        total += tl.load(choice_ptr + (node * num_chosen + k) * D + channel, mask=channel < D, other=0.0)
    tl.store(output_ptr + node * D + channel, total, mask=channel < D)


@dataclass(frozen=True, slots=True, kw_only=True)
class TileSizes:
    """rows: tokens of a tile. out, channels: weights of a step. The rest are the compiler's."""

    rows: int
    out: int
    channels: int
    num_warps: int
    num_stages: int


def tile_sizes(num_pairs: int, num_experts: int) -> TileSizes:
    """Tiles of as many tokens as an expert gets on average, 16 to 64."""
    rows = min(max(triton.next_power_of_2(num_pairs // num_experts), 16), 64)
    return TileSizes(rows=rows, out=64, channels=128, num_warps=4, num_stages=3)


def fp4_experts(x_TD: torch.Tensor, routing: Routing, experts: PackedExperts, limit: float) -> torch.Tensor:
    """See `kernels.fp4_experts`; x is float32, float16 or bfloat16, and the result float32."""
    num_nodes, width = x_TD.shape
    num_chosen = routing.experts_TK.shape[1]
    num_experts, inner = experts.w13.shape[0], experts.w13.shape[1] // 2
    assert width % FP4_GROUP == inner % FP4_GROUP == 0, "a scale stands for 32 columns"
    assert experts.w13.is_contiguous() and experts.w2.is_contiguous(), "experts lie one after the other"
    num_pairs = num_nodes * num_chosen
    sizes = tile_sizes(num_pairs, num_experts)
    tiles = expert_tiles(routing.experts_TK.flatten(), num_experts, sizes.rows)
    hidden_NF = x_TD.new_empty((num_pairs, inner))
    choice_ND = x_TD.new_empty((num_pairs, width), dtype=torch.float32)
    output_TD = x_TD.new_empty((num_nodes, width), dtype=torch.float32)
    x_TD, weights_TK = x_TD.contiguous(), routing.weights_TK.contiguous()
    constants = {"D": width, "F": inner, "ROWS": sizes.rows, "OUT": sizes.out, "CHANNELS": sizes.channels}
    options = {"num_warps": sizes.num_warps, "num_stages": sizes.num_stages}
    gate_up_kernel[(triton.cdiv(inner, sizes.out), len(tiles.expert_M))](
        x_TD,
        tiles.order_N,
        weights_TK,
        tiles.expert_M,
        tiles.first_M,
        tiles.end_M,
        experts.w13.view(torch.uint8),
        experts.w13_scale.view(torch.uint8),
        hidden_NF,
        limit,
        num_chosen=num_chosen,
        **constants,
        **options,
    )
    down_kernel[(triton.cdiv(width, sizes.out), len(tiles.expert_M))](
        hidden_NF,
        tiles.order_N,
        tiles.expert_M,
        tiles.first_M,
        tiles.end_M,
        experts.w2.view(torch.uint8),
        experts.w2_scale.view(torch.uint8),
        choice_ND,
        **constants,
        **options,
    )
    sum_choices_kernel[(num_nodes, triton.cdiv(width, SUM_BLOCK))](
        choice_ND, output_TD, num_chosen=num_chosen, D=width, BLOCK=SUM_BLOCK
    )
    return output_TD
