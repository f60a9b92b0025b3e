"""The routed experts over packed FP4 weights: four launches (sort, gate / up, down, sum), nothing read back.

Tokens are few and weights many, so the weights are the rows of each product and the tokens its columns. Products are in
x's dtype with float32 sums. For bfloat16, scales are at most 2.

T = nodes, D = model width, E = experts, F = expert width, K = experts a token, N = (node, choice) pairs
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from compressed_spec.kernels.decode_triton import e2m1_gain, e2m1_pair
from compressed_spec.kernels.dequantize import FP4_GROUP
from compressed_spec.kernels.expert_tiles_triton import expert_tiles
from compressed_spec.kernels.fp4_experts import PackedExperts
from compressed_spec.kernels.moe import Routing
from compressed_spec.kernels.sum_parts_triton import sum_parts


@triton.jit
def _dot_pair(acc, word, gain, x, nibble: tl.constexpr):
    low, high = e2m1_pair(word, gain, nibble, x.dtype)
    x_low, x_high = tl.split(x)
    acc = tl.dot(low, tl.trans(x_low), acc, input_precision="ieee")
    return tl.dot(high, tl.trans(x_high), acc, input_precision="ieee")


@triton.jit
def _product(acc, word, scale, x):
    """acc [O, M] plus FP4 weights (words [O, C / 8], scale [O, C / 32]) times x [M, C].

    The columns of a word go into eight products, with the channels of x to match.
    """
    OUT: tl.constexpr = scale.shape[0]
    GROUPS: tl.constexpr = scale.shape[1]
    gain = e2m1_gain(scale, x.dtype)
    gain = tl.reshape(tl.broadcast_to(gain[:, :, None], [OUT, GROUPS, 4]), [OUT, GROUPS * 4])
    # Column 8 w + 4 h + n is nibble n of half h of word w.
    x_even, x_odd = tl.split(tl.reshape(x, [x.shape[0], GROUPS * 4, 2, 2, 2]))
    x_0, x_2 = tl.split(x_even)
    x_1, x_3 = tl.split(x_odd)
    # A sum of its own: with one that is carried through the loop, Triton 3.6 cannot compile this for sm_100.
    part = _dot_pair(tl.zeros_like(acc), word, gain, x_0, 0)
    part = _dot_pair(part, word, gain, x_1, 1)
    part = _dot_pair(part, word, gain, x_2, 2)
    return acc + _dot_pair(part, word, gain, x_3, 3)


@triton.jit
def gate_up_kernel(
    p_x,
    p_order,
    p_weights,
    p_expert,
    p_first,
    p_end,
    p_words,
    p_scale,
    p_hidden,
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
    expert = tl.load(p_expert + tile).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(p_first + tile) + tl.arange(0, ROWS)
    there = place < tl.load(p_end + tile)
    pair = tl.load(p_order + place, mask=there, other=0)
    x_rows = (pair // num_chosen).to(tl.int64) * D

    out = tl.program_id(0) * OUT + tl.arange(0, OUT)
    inside = (out < F)[:, None]
    gate_row = expert * (2 * F) + out
    word, group, channel = tl.arange(0, CHANNELS // 8), tl.arange(0, CHANNELS // 32), tl.arange(0, CHANNELS)
    gate = tl.zeros([OUT, ROWS], tl.float32)
    up = tl.zeros([OUT, ROWS], tl.float32)
    for start in range(0, D, CHANNELS):
        x = tl.load(
            p_x + x_rows[:, None] + (start + channel)[None, :],
            mask=there[:, None] & (start + channel < D)[None, :],
            other=0.0,
        )
        words_there = inside & (start // 8 + word < D // 8)[None, :]
        groups_there = inside & (start // 32 + group < D // 32)[None, :]
        words = p_words + gate_row[:, None] * (D // 8) + (start // 8 + word)[None, :]
        scale = p_scale + gate_row[:, None] * (D // 32) + (start // 32 + group)[None, :]
        gate = _product(
            gate,
            tl.load(words, mask=words_there, other=0),
            tl.load(scale, mask=groups_there, other=0),
            x,
        )
        up = _product(
            up,
            tl.load(words + F * (D // 8), mask=words_there, other=0),
            tl.load(scale + F * (D // 32), mask=groups_there, other=0),
            x,
        )
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    weight = tl.load(p_weights + pair, mask=there, other=0.0).to(tl.float32)
    hidden = gate / (1.0 + tl.exp(-gate)) * up * weight[None, :]
    tl.store(
        p_hidden + place.to(tl.int64)[None, :] * F + out[:, None],
        hidden.to(p_hidden.dtype.element_ty),
        mask=inside & there[None, :],
    )


@triton.jit
def down_kernel(
    p_hidden,
    p_order,
    p_expert,
    p_first,
    p_end,
    p_words,
    p_scale,
    p_choice,
    D: tl.constexpr,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """choice[pair] = w2 hidden[i], where pair is the i-th in order: back in the nodes' own order, float32."""
    tile = tl.program_id(1)
    expert = tl.load(p_expert + tile).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(p_first + tile) + tl.arange(0, ROWS)
    there = place < tl.load(p_end + tile)
    pair = tl.load(p_order + place, mask=there, other=0).to(tl.int64)
    hidden_rows = place.to(tl.int64) * F

    out = tl.program_id(0) * OUT + tl.arange(0, OUT)
    inside = (out < D)[:, None]
    row = expert * D + out
    word, group, channel = tl.arange(0, CHANNELS // 8), tl.arange(0, CHANNELS // 32), tl.arange(0, CHANNELS)
    acc = tl.zeros([OUT, ROWS], tl.float32)
    for start in range(0, F, CHANNELS):
        hidden = tl.load(
            p_hidden + hidden_rows[:, None] + (start + channel)[None, :],
            mask=there[:, None] & (start + channel < F)[None, :],
            other=0.0,
        )
        words = p_words + row[:, None] * (F // 8) + (start // 8 + word)[None, :]
        scale = p_scale + row[:, None] * (F // 32) + (start // 32 + group)[None, :]
        acc = _product(
            acc,
            tl.load(words, mask=inside & (start // 8 + word < F // 8)[None, :], other=0),
            tl.load(scale, mask=inside & (start // 32 + group < F // 32)[None, :], other=0),
            hidden,
        )
    tl.store(p_choice + pair[None, :] * D + out[:, None], acc, mask=inside & there[None, :])


def fp4_experts_config(num_pairs: int, num_experts: int) -> dict[str, int]:
    """Tiles of both products: ROWS tokens (what an expert gets on average, 16 or 32) by OUT x CHANNELS weights."""
    rows = min(max(triton.next_power_of_2(num_pairs // num_experts), 16), 32)
    return {"ROWS": rows, "OUT": 128 if rows == 16 else 64, "CHANNELS": 128, "num_warps": 4, "num_stages": 3}


def fp4_experts(
    x_TD: torch.Tensor,
    routing: Routing,
    experts: PackedExperts,
    limit: float,
    plus_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `kernels.fp4_experts`; x is float32, float16 or bfloat16, and the result float32 where nothing is added."""
    num_nodes, width = x_TD.shape
    num_chosen = routing.experts_TK.shape[1]
    num_experts, inner = experts.w13.shape[0], experts.w13.shape[1] // 2
    assert width % FP4_GROUP == inner % FP4_GROUP == 0, "a scale stands for 32 columns"
    num_pairs = num_nodes * num_chosen
    config = fp4_experts_config(num_pairs, num_experts)
    tiles = expert_tiles(routing.experts_TK.flatten(), num_experts, config["ROWS"])
    hidden_NF = x_TD.new_empty((num_pairs, inner))
    choice_ND = x_TD.new_empty((num_pairs, width), dtype=torch.float32)
    x_TD, weights_TK = x_TD.contiguous(), routing.weights_TK.contiguous()
    gate_up_kernel[(triton.cdiv(inner, config["OUT"]), len(tiles.expert_M))](
        x_TD,
        tiles.order_N,
        weights_TK,
        tiles.expert_M,
        tiles.first_M,
        tiles.end_M,
        experts.w13.contiguous().view(torch.uint32),
        experts.w13_scale.view(torch.uint8),
        hidden_NF,
        limit,
        num_chosen=num_chosen,
        D=width,
        F=inner,
        **config,
    )
    down_kernel[(triton.cdiv(width, config["OUT"]), len(tiles.expert_M))](
        hidden_NF,
        tiles.order_N,
        tiles.expert_M,
        tiles.first_M,
        tiles.end_M,
        experts.w2.contiguous().view(torch.uint32),
        experts.w2_scale.view(torch.uint8),
        choice_ND,
        D=width,
        F=inner,
        **config,
    )
    dtype = torch.float32 if plus_TD is None else x_TD.dtype
    return sum_parts(choice_ND.view(num_nodes, num_chosen, width), dtype, plus_TD)
