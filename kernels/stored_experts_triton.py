"""The routed experts over weights as they are stored: four launches (sort, gate / up, down, sum), nothing read back.

Tokens are few and weights many, so the weights are the rows of each product and the tokens its columns. Products are in
x's dtype with float32 sums. For bfloat16, scales of FP4 are at most 2.

T = nodes, D = model width, E = experts, F = expert width, K = experts a token, N = (node, choice) pairs
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from compressed_spec.kernels.dequantize import FP4_GROUP
from compressed_spec.kernels.expert_tiles_triton import expert_tiles
from compressed_spec.kernels.moe import Routing
from compressed_spec.kernels.stored_experts import StoredExperts, StoredFormat
from compressed_spec.kernels.sum_parts_triton import sum_parts
from compressed_spec.kernels.weight_products_triton import FP4, FP8, PLAIN, product

FORMATS = {StoredFormat.FP4: FP4.value, StoredFormat.FP8: FP8.value, StoredFormat.PLAIN: PLAIN.value}


@triton.jit
def gate_up_kernel(
    p_x,
    p_order,
    p_weights,
    p_expert,
    p_first,
    p_end,
    p_stored,
    p_scale,
    p_hidden,
    limit,
    num_chosen: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
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
    inside = out < F
    gate_row = expert * (2 * F) + out
    halves: tl.constexpr = (F + BLOCK_OUT - 1) // BLOCK_OUT
    gate_scale = expert * (2 * halves) + out // BLOCK_OUT
    channel = tl.arange(0, CHANNELS)
    gate = tl.zeros([OUT, ROWS], tl.float32)
    up = tl.zeros([OUT, ROWS], tl.float32)
    for start in range(0, D, CHANNELS):
        x = tl.load(
            p_x + x_rows[:, None] + (start + channel)[None, :],
            mask=there[:, None] & (start + channel < D)[None, :],
            other=0.0,
        )
        gate = product(gate, p_stored, p_scale, gate_row, gate_scale, inside, start, x, D, FORMAT, BLOCK_IN)
        up = product(up, p_stored, p_scale, gate_row + F, gate_scale + halves, inside, start, x, D, FORMAT, BLOCK_IN)
    gate = tl.minimum(gate, limit)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    weight = tl.load(p_weights + pair, mask=there, other=0.0).to(tl.float32)
    hidden = gate / (1.0 + tl.exp(-gate)) * up * weight[None, :]
    tl.store(
        p_hidden + place.to(tl.int64)[None, :] * F + out[:, None],
        hidden.to(p_hidden.dtype.element_ty),
        mask=inside[:, None] & there[None, :],
    )


@triton.jit
def down_kernel(
    p_hidden,
    p_order,
    p_expert,
    p_first,
    p_end,
    p_stored,
    p_scale,
    p_choice,
    D: tl.constexpr,
    F: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
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
    inside = out < D
    row, scale_row = expert * D + out, expert * ((D + BLOCK_OUT - 1) // BLOCK_OUT) + out // BLOCK_OUT
    channel = tl.arange(0, CHANNELS)
    acc = tl.zeros([OUT, ROWS], tl.float32)
    for start in range(0, F, CHANNELS):
        hidden = tl.load(
            p_hidden + hidden_rows[:, None] + (start + channel)[None, :],
            mask=there[:, None] & (start + channel < F)[None, :],
            other=0.0,
        )
        acc = product(acc, p_stored, p_scale, row, scale_row, inside, start, hidden, F, FORMAT, BLOCK_IN)
    tl.store(p_choice + pair[None, :] * D + out[:, None], acc, mask=inside[:, None] & there[None, :])


def experts_config(num_pairs: int, num_experts: int, stored: StoredFormat, block_in: int = 0) -> dict[str, int]:
    """Tiles of both products: ROWS tokens (what an expert gets on average, 16 or 32) by OUT x CHANNELS weights.

    block_in: columns of a scale of FP8 weights.
    """
    rows = min(max(triton.next_power_of_2(num_pairs // num_experts), 16), 32)
    config = {"ROWS": rows, "OUT": 128 if rows == 16 else 64, "CHANNELS": 128, "num_warps": 4, "num_stages": 3}
    if stored is StoredFormat.FP8:
        config |= {"OUT": 64, "CHANNELS": min(128, block_in)}
    elif stored is StoredFormat.PLAIN:
        config |= {"OUT": 64, "CHANNELS": 64}
    return config


def stored_experts(
    x_TD: torch.Tensor,
    routing: Routing,
    experts: StoredExperts,
    limit: float,
    plus_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `kernels.stored_experts`; x is float32, float16 or bfloat16; the result float32 where nothing is added."""
    num_nodes, width = x_TD.shape
    num_chosen = routing.experts_TK.shape[1]
    num_experts, inner = experts.w13.shape[0], experts.w13.shape[1] // 2
    block_out, block_in = experts.block or (1, 1)
    stored = experts.format
    if stored is StoredFormat.FP4:
        assert width % FP4_GROUP == inner % FP4_GROUP == 0, "a scale stands for 32 columns"
    elif stored is StoredFormat.FP8:
        assert width % 4 == inner % 4 == 0, "a word holds four columns"
        assert block_in % 64 == 0, "a step of 64 or 128 columns has one scale"
    num_pairs = num_nodes * num_chosen
    config = experts_config(num_pairs, num_experts, stored, block_in)
    tiles = expert_tiles(routing.experts_TK.flatten(), num_experts, config["ROWS"])
    hidden_NF = x_TD.new_empty((num_pairs, inner))
    choice_ND = x_TD.new_empty((num_pairs, width), dtype=torch.float32)
    x_TD, weights_TK = x_TD.contiguous(), routing.weights_TK.contiguous()
    common = {"D": width, "F": inner, "FORMAT": FORMATS[stored], "BLOCK_OUT": block_out, "BLOCK_IN": block_in, **config}
    gate_up_kernel[(triton.cdiv(inner, config["OUT"]), len(tiles.expert_M))](
        x_TD,
        tiles.order_N,
        weights_TK,
        tiles.expert_M,
        tiles.first_M,
        tiles.end_M,
        _words(experts.w13),
        _scales(experts.w13_scale),
        hidden_NF,
        limit,
        num_chosen=num_chosen,
        **common,
    )
    down_kernel[(triton.cdiv(width, config["OUT"]), len(tiles.expert_M))](
        hidden_NF,
        tiles.order_N,
        tiles.expert_M,
        tiles.first_M,
        tiles.end_M,
        _words(experts.w2),
        _scales(experts.w2_scale),
        choice_ND,
        **common,
    )
    dtype = torch.float32 if plus_TD is None else x_TD.dtype
    return sum_parts(choice_ND.view(num_nodes, num_chosen, width), dtype, plus_TD)


def _words(stored: torch.Tensor) -> torch.Tensor:
    return stored.contiguous().view(torch.uint32) if stored.element_size() == 1 else stored.contiguous()


def _scales(scale: torch.Tensor | None) -> torch.Tensor | None:
    return scale.view(torch.uint8) if scale is not None and scale.element_size() == 1 else scale
