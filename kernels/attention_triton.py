"""Sparse attention on a GPU: each program takes one node, a tile of heads, and a run of its listed rows.

A row is both key and value, so a tile of rows is fetched once and used twice, by every head of the tile. Where there
are few nodes, their lists are cut into runs; a second kernel adds the runs in their order.

R = pool rows, T = nodes, H = heads, D = head width, W = window, K = compressed entries listed, S = runs a list is cut
into, N = rows of a tile
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from compressed_spec.kernels import fp8_rows
from compressed_spec.kernels.decode_triton import e4m3, e4m3_gain
from compressed_spec.kernels.triton_device import multiprocessors

LOG2_E = tl.constexpr(1.4426950408889634)
NO_PEAK = tl.constexpr(-1e30)


@triton.jit(do_not_specialize=["compressed_length", "tiles_a_run"])
def sparse_attention_kernel(
    p_q,
    p_window,
    p_window_rows,
    p_compressed,
    p_compressed_rows,
    p_sink,
    p_out,
    p_mass,
    window_length,
    compressed_length,
    tiles_a_run,
    stride_q,
    stride_window,
    stride_compressed,
    scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT: tl.constexpr,
    P: tl.constexpr,
    FP8_GROUP: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Grid (head tiles, nodes, runs). Tiles of rows are numbered through the window's list and then the other.

    FP8_GROUP: rows are bytes in the format of `kernels.fp8_rows`, P pairs rotated and a scale for so many channels; 0:
    rows as they are.

    The output is `[T, H, D]`; with SPLIT that of each run, float32 `[S, T, H, D]`, and log2 of its softmax's
    denominator, `[S, T, H]`.
    """
    i_t, i_s = tl.program_id(1).to(tl.int64), tl.program_id(2)
    o_h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    o_n, o_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    o_hd = o_h[:, None] * D + o_d[None, :]
    # Without masks where there is nothing to mask: they cost registers that this kernel does not have.
    if H % BLOCK_H == 0 and D == BLOCK_D:
        b_q = tl.load(p_q + i_t * stride_q + o_hd)
    else:
        b_q = tl.load(p_q + i_t * stride_q + o_hd, mask=(o_h < H)[:, None] & (o_d < D)[None, :], other=0.0)

    if FP8_GROUP:
        # The rotated channels are not codes, and go into products of their own.
        o_p = tl.arange(0, BLOCK_P)
        o_tail = o_h[:, None] * D + (D - 2 * P + o_p)[None, :]
        b_q_tail = tl.load(p_q + i_t * stride_q + o_tail, mask=(o_h < H)[:, None] & (o_p < 2 * P)[None, :], other=0.0)
        b_sum_tail = tl.zeros((BLOCK_H, BLOCK_P), dtype=tl.float32)

    window_tiles = tl.cdiv(window_length, BLOCK_N)
    num_tiles = window_tiles + tl.cdiv(compressed_length, BLOCK_N)
    first = i_s * tiles_a_run if SPLIT else 0
    last = tl.minimum(first + tiles_a_run, num_tiles) if SPLIT else num_tiles
    p_window_list = p_window_rows + i_t * window_length
    p_compressed_list = p_compressed_rows + i_t * compressed_length

    # Scores and peaks are in units of log 2. The sink is a score without a value, and belongs to the first run; no peak
    # is -inf, so that a list of -1 makes no NaN.
    b_sink = tl.load(p_sink + o_h, mask=o_h < H, other=0.0).to(tl.float32) * LOG2_E
    b_peak = tl.maximum(b_sink, NO_PEAK)
    b_total = tl.full((BLOCK_H,), 1.0, dtype=tl.float32)
    if SPLIT:
        b_peak = tl.where(i_s == 0, b_peak, NO_PEAK)
        b_total = tl.where(i_s == 0, b_total, 0.0)
    b_sum = tl.zeros((BLOCK_H, BLOCK_D), dtype=tl.float32)
    # Row ids are read one tile ahead, so that the rows themselves can be fetched several tiles ahead.
    b_row = _row_ids(p_window_list, p_compressed_list, window_length, compressed_length, first, window_tiles, o_n)
    for i in range(first, last):
        b_next = _row_ids(p_window_list, p_compressed_list, window_length, compressed_length, i + 1, window_tiles, o_n)
        p_pool = tl.where(i < window_tiles, p_window, p_compressed)
        stride = tl.where(i < window_tiles, stride_window, stride_compressed)
        p_row = p_pool + b_row.to(tl.int64) * stride
        if FP8_GROUP:
            b_kv = _fp8_rows(p_row, b_row >= 0, o_d, b_q.dtype, D, P, FP8_GROUP)
            b_tail = _fp8_tails(p_row, b_row >= 0, b_q.dtype, D, P, BLOCK_P)
        else:
            m_nd = (b_row >= 0)[:, None]
            if D != BLOCK_D:
                m_nd = m_nd & (o_d < D)[None, :]
            b_kv = tl.load(p_row[:, None] + o_d[None, :], mask=m_nd, other=0.0)
        b_score = tl.dot(b_q, tl.trans(b_kv), input_precision="ieee")
        if FP8_GROUP:
            b_score = tl.dot(b_q_tail, tl.trans(b_tail), b_score, input_precision="ieee")
        b_score = b_score * (scale * LOG2_E)
        b_score = tl.where((b_row >= 0)[None, :], b_score, float("-inf"))
        b_new = tl.maximum(b_peak, tl.max(b_score, axis=1))
        b_weight = tl.exp2(b_score - b_new[:, None])
        b_fade = tl.exp2(b_peak - b_new)
        b_total = b_total * b_fade + tl.sum(b_weight, axis=1)
        b_sum = tl.dot(b_weight.to(b_kv.dtype), b_kv, b_sum * b_fade[:, None], input_precision="ieee")
        if FP8_GROUP:
            b_sum_tail = tl.dot(b_weight.to(b_kv.dtype), b_tail, b_sum_tail * b_fade[:, None], input_precision="ieee")
        b_peak = b_new
        b_row = b_next

    # Counted anew (the minimum is 0), so that no offsets are kept in registers throughout the loop.
    o_h = tl.program_id(0) * BLOCK_H + tl.minimum(tiles_a_run, 0) + tl.arange(0, BLOCK_H)
    o_hd = o_h[:, None] * D + tl.arange(0, BLOCK_D)[None, :]
    i_st = i_t
    if SPLIT:
        i_st += i_s.to(tl.int64) * tl.num_programs(1)
        b_mass = b_peak + tl.log2(b_total)
        b_total = tl.where(b_total > 0.0, b_total, 1.0)
    b_out = (b_sum / b_total[:, None]).to(p_out.dtype.element_ty)
    if H % BLOCK_H == 0 and D - 2 * P == BLOCK_D:
        tl.store(p_out + i_st * (H * D) + o_hd, b_out)
    else:
        o_d = tl.arange(0, BLOCK_D)
        tl.store(p_out + i_st * (H * D) + o_hd, b_out, mask=(o_h < H)[:, None] & (o_d < D - 2 * P)[None, :])
    if FP8_GROUP:
        o_p = tl.arange(0, BLOCK_P)
        o_tail = o_h[:, None] * D + (D - 2 * P + o_p)[None, :]
        b_out = (b_sum_tail / b_total[:, None]).to(p_out.dtype.element_ty)
        tl.store(p_out + i_st * (H * D) + o_tail, b_out, mask=(o_h < H)[:, None] & (o_p < 2 * P)[None, :])
    if SPLIT:
        tl.store(p_mass + i_st * H + o_h, b_mass, mask=o_h < H)


@triton.jit
def _fp8_rows(p_row, m_n, o_d, dtype: tl.constexpr, D: tl.constexpr, P: tl.constexpr, GROUP: tl.constexpr):
    """The plain channels of rows at byte pointers; zeros for the others, and where m_n is false."""
    PLAIN: tl.constexpr = D - 2 * P
    BLOCK_N: tl.constexpr = p_row.shape[0]
    BLOCK_D: tl.constexpr = o_d.shape[0]
    GROUPS: tl.constexpr = BLOCK_D // GROUP
    o_g = tl.arange(0, GROUPS)
    b_code = tl.load(p_row[:, None] + o_d[None, :], mask=m_n[:, None] & (o_d < PLAIN)[None, :], other=0)
    m_scale = m_n[:, None] & (o_g < PLAIN // GROUP)[None, :]
    b_gain = e4m3_gain(tl.load((p_row + (PLAIN + 4 * P))[:, None] + o_g[None, :], mask=m_scale, other=0), dtype)
    b_gain = tl.reshape(tl.broadcast_to(b_gain[:, :, None], [BLOCK_N, GROUPS, GROUP]), [BLOCK_N, BLOCK_D])
    return e4m3(b_code, b_gain, dtype)


@triton.jit
def _fp8_tails(p_row, m_n, dtype: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BLOCK_P: tl.constexpr):
    """The rotated channels of such rows."""
    o_p = tl.arange(0, BLOCK_P)
    p_tail = (p_row + (D - 2 * P)).to(tl.pointer_type(tl.bfloat16))
    return tl.load(p_tail[:, None] + o_p[None, :], mask=m_n[:, None] & (o_p < 2 * P)[None, :], other=0.0).to(dtype)


@triton.jit
def _row_ids(p_window_list, p_compressed_list, window_length, compressed_length, i, window_tiles, o_n):
    in_window = i < window_tiles
    o_list = tl.where(in_window, i, i - window_tiles) * o_n.shape[0] + o_n
    p_list = tl.where(in_window, p_window_list, p_compressed_list)
    length = tl.where(in_window, window_length, compressed_length)
    return tl.load(p_list + o_list, mask=o_list < length, other=-1).to(tl.int32)


@triton.jit
def combine_runs_kernel(
    p_part, p_mass, p_out, num_rows, num_runs, D: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Softmax over runs of their masses, times their outputs, run after run. A row is a head of a node."""
    o_r, o_d = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)
    m_r = o_r < num_rows
    m_rd = m_r[:, None] & (o_d < D)[None, :]
    stride = tl.cast(num_rows, tl.int64)
    b_peak = tl.full((BLOCK_R,), float("-inf"), dtype=tl.float32)
    for i in range(num_runs):
        b_peak = tl.maximum(b_peak, tl.load(p_mass + i * stride + o_r, mask=m_r, other=0.0))
    b_total = tl.zeros((BLOCK_R,), dtype=tl.float32)
    b_out = tl.zeros((BLOCK_R, BLOCK_D), dtype=tl.float32)
    for i in range(num_runs):
        o_ir = i * stride + o_r
        b_weight = tl.exp2(tl.load(p_mass + o_ir, mask=m_r, other=0.0) - b_peak)
        b_part = tl.load(p_part + o_ir[:, None] * D + o_d[None, :], mask=m_rd, other=0.0)
        b_total += b_weight
        b_out += b_weight[:, None] * b_part
    b_out = (b_out / b_total[:, None]).to(p_out.dtype.element_ty)
    tl.store(p_out + o_r[:, None] * D + o_d[None, :], b_out, mask=m_rd)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """Tiles of a launch: `kernel` and `combine` are the keyword arguments of the two kernels."""

    kernel: dict[str, int]
    combine: dict[str, int]


def attention_config(
    num_heads: int, head_dim: int, dtype: torch.dtype, *, split: bool, fp8: bool = False
) -> AttentionConfig:
    """Up to 64 heads a program share a tile. Half precision runs on tensor cores; float32 is for comparisons.

    Rows are fetched two tiles ahead, but one where lists are cut: such a program has no registers left for more.
    Decoding FP8 rows takes registers too: whole lists of them leave room for 16 heads (on sm_80, triton 3.6).
    """
    half = dtype != torch.float32
    block_d = max(16, triton.next_power_of_2(head_dim))
    most_heads, block_n = (64, 32) if half else (16, 16)
    if fp8:
        most_heads, block_n = min(most_heads, 32 if split else 16), 16
    block_h = max(16, min(triton.next_power_of_2(num_heads), most_heads))
    kernel = {"BLOCK_H": block_h, "BLOCK_N": block_n, "BLOCK_D": block_d, "num_warps": 8}
    kernel["num_stages"] = 2 if split or fp8 else 3
    return AttentionConfig(kernel=kernel, combine={"BLOCK_R": max(1, 2048 // block_d), "BLOCK_D": block_d})


def runs_of(num_programs: int, num_tiles: int, num_processors: int) -> tuple[int, int]:
    """Runs that a list of tiles is cut into, and tiles a run: enough to occupy the processors, of 2 tiles or more."""
    wanted = max(1, min(num_processors // num_programs, num_tiles // 2))
    tiles_a_run = max(1, triton.cdiv(num_tiles, wanted))
    return max(1, triton.cdiv(num_tiles, tiles_a_run)), tiles_a_run


def sparse_attention(
    q_THD: torch.Tensor,
    window_RD: torch.Tensor,
    window_rows_TW: torch.Tensor,
    compressed_RD: torch.Tensor | None,
    compressed_rows_TK: torch.Tensor | None,
    sink_H: torch.Tensor,
    num_rotated: int = 0,
    *,
    num_processors: int | None = None,
) -> torch.Tensor:
    """As `kernels.attention.sparse_attention`; float32, bfloat16 or float16, lists int64.

    num_processors: how many programs to aim at where there are few nodes; by default the device's multiprocessors.
    """
    packed = window_RD.dtype == torch.uint8
    assert packed or q_THD.dtype == window_RD.dtype, f"attention in {q_THD.dtype} over {window_RD.dtype} rows"
    assert q_THD.dtype != torch.float64, "kernels compute in float32"
    assert compressed_RD is None or compressed_RD.dtype == window_RD.dtype, "one format of rows"
    num_nodes, num_heads, head_dim = q_THD.shape
    if compressed_RD is None or compressed_rows_TK is None:
        compressed_RD, compressed_rows_TK = window_RD, window_rows_TW[:, :0]
    window_length, compressed_length = window_rows_TW.shape[1], compressed_rows_TK.shape[1]
    q_THD, window_rows_TW = q_THD.contiguous(), window_rows_TW.contiguous()
    compressed_rows_TK = compressed_rows_TK.contiguous()
    output_THD = torch.empty_like(q_THD)
    if not num_nodes:
        return output_THD
    tiles = attention_config(num_heads, head_dim, q_THD.dtype, split=False, fp8=packed).kernel
    head_tiles, tile = triton.cdiv(num_heads, tiles["BLOCK_H"]), tiles["BLOCK_N"]
    num_tiles = triton.cdiv(window_length, tile) + triton.cdiv(compressed_length, tile)
    processors = multiprocessors(q_THD.device) if num_processors is None else num_processors
    num_runs, tiles_a_run = runs_of(head_tiles * num_nodes, num_tiles, processors)
    split = num_runs > 1
    config = attention_config(num_heads, head_dim, q_THD.dtype, split=split, fp8=packed)
    part_STHD = q_THD.new_empty((num_runs, *q_THD.shape), dtype=torch.float32) if split else output_THD
    mass_STH = q_THD.new_empty((num_runs, num_nodes, num_heads), dtype=torch.float32) if split else None
    sparse_attention_kernel[(head_tiles, num_nodes, num_runs)](
        q_THD,
        window_RD,
        window_rows_TW,
        compressed_RD,
        compressed_rows_TK,
        sink_H,
        part_STHD,
        mass_STH,
        window_length,
        compressed_length,
        tiles_a_run,
        q_THD.stride(0),
        window_RD.stride(0),
        compressed_RD.stride(0),
        head_dim**-0.5,
        H=num_heads,
        D=head_dim,
        SPLIT=split,
        P=num_rotated // 2 if packed else 0,
        FP8_GROUP=fp8_rows.GROUP if packed else 0,
        BLOCK_P=max(16, triton.next_power_of_2(num_rotated)) if packed else 0,
        **config.kernel,
    )
    if split:
        num_rows = num_nodes * num_heads
        combine_runs_kernel[(triton.cdiv(num_rows, config.combine["BLOCK_R"]),)](
            part_STHD, mass_STH, output_THD, num_rows, num_runs, D=head_dim, **config.combine
        )
    return output_THD
