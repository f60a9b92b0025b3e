"""RMS norm and rotary embedding in one pass on a GPU, stored as they are or as FP8 rows.

T = nodes, H = heads, D = head width, P = rotated pairs, N = rows (T H), G = groups that share an FP8 scale,
B = bytes of an FP8 row
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from compressed_spec.kernels import fp8_rows
from compressed_spec.kernels.e4m3_triton import encode_bf16, encode_e4m3

ELEMENTS = 4096  # of a program's tile
SMALLEST_PEAK = tl.constexpr(fp8_rows.SMALLEST_PEAK)


@triton.jit
def norm_rope_kernel(
    p_x,
    p_weight,
    p_cos,
    p_sin,
    p_out,
    num_rows,
    num_heads,
    stride_xt,
    stride_xh,
    stride_out,
    eps,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
    FP8_GROUP: tl.constexpr,
):
    """NORM: RMS norm, times the weight unless p_weight is None. P = 0: no rotation. FP8_GROUP: rows of bytes, with a
    scale for so many plain channels; 0: rows as they are."""
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    i_t, i_h = (o_n // num_heads).to(tl.int64), (o_n % num_heads).to(tl.int64)
    m_n = o_n < num_rows
    m_nd = m_n[:, None] & (o_d < D)[None, :]
    b_x = tl.load(p_x + (i_t * stride_xt + i_h * stride_xh)[:, None] + o_d[None, :], mask=m_nd, other=0.0)
    b_y = b_x.to(tl.float32)
    if NORM:
        b_y = b_y * tl.rsqrt(tl.sum(b_y * b_y, axis=1) / D + eps)[:, None]
        if p_weight is not None:
            b_y = b_y * tl.load(p_weight + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
        # Between norm and rotation the reference rounds to the activations' dtype.
        b_y = b_y.to(b_x.dtype).to(tl.float32)
    if P > 0:
        b_y = rotate(b_y, p_cos + i_t * P, p_sin + i_t * P, m_n, D, P)
    b_y = b_y.to(b_x.dtype)
    p_row = p_out + o_n.to(tl.int64) * stride_out
    if FP8_GROUP:
        store_fp8_rows(p_row, b_y, m_n, D, P, FP8_GROUP)
    else:
        tl.store(p_row[:, None] + o_d[None, :], b_y.to(p_out.dtype.element_ty), mask=m_nd)


@triton.jit
def rotate(b_y, p_cos, p_sin, m_n, D: tl.constexpr, P: tl.constexpr):
    """Turn the last 2 P of D channels of each row, pairs (2i, 2i+1), by the angles at its pointers."""
    BLOCK_N: tl.constexpr = b_y.shape[0]
    PAIRS: tl.constexpr = b_y.shape[1] // 2
    o_p = tl.arange(0, PAIRS) - (D // 2 - P)
    m_p = ((o_p >= 0) & (o_p < P))[None, :]
    m_np = m_n[:, None] & m_p
    b_cos = tl.load(p_cos[:, None] + o_p[None, :], mask=m_np, other=1.0)
    b_sin = tl.load(p_sin[:, None] + o_p[None, :], mask=m_np, other=0.0)
    b_even, b_odd = tl.split(tl.reshape(b_y, (BLOCK_N, PAIRS, 2)))
    b_even, b_odd = (
        tl.where(m_p, b_even * b_cos - b_odd * b_sin, b_even),
        tl.where(m_p, b_even * b_sin + b_odd * b_cos, b_odd),
    )
    return tl.reshape(tl.join(b_even, b_odd), (BLOCK_N, 2 * PAIRS))


@triton.jit
def store_fp8_rows(p_row, b_y, m_n, D: tl.constexpr, P: tl.constexpr, GROUP: tl.constexpr):
    """Write rows in the format of `kernels.fp8_rows` to byte pointers."""
    BLOCK_N: tl.constexpr = b_y.shape[0]
    BLOCK_D: tl.constexpr = b_y.shape[1]
    GROUPS: tl.constexpr = BLOCK_D // GROUP
    PLAIN: tl.constexpr = D - 2 * P
    SCALES: tl.constexpr = PLAIN // GROUP
    tl.static_assert(PLAIN % GROUP == 0)
    o_d, o_g = tl.arange(0, BLOCK_D), tl.arange(0, GROUPS)
    b_group = tl.reshape(b_y.to(tl.float32), (BLOCK_N, GROUPS, GROUP))
    b_peak = tl.maximum(tl.max(tl.abs(b_group), axis=2), SMALLEST_PEAK).to(tl.uint32, bitcast=True)
    # ceil(log2(peak / 448)): 448 is 1.75 times 2^8.
    b_scale = (b_peak >> 23) - 8 + ((b_peak & 0x7FFFFF) > 0x600000).to(tl.uint32)
    b_inverse = ((254 - b_scale) << 23).to(tl.float32, bitcast=True)
    b_code = encode_e4m3(b_group * b_inverse[:, :, None])
    m_plain = m_n[:, None] & (o_d < PLAIN)[None, :]
    tl.store(p_row[:, None] + o_d[None, :], tl.reshape(b_code, (BLOCK_N, BLOCK_D)), mask=m_plain)
    p_tail = (p_row + PLAIN).to(tl.pointer_type(tl.uint16))
    m_tail = m_n[:, None] & ((o_d >= PLAIN) & (o_d < D))[None, :]
    tl.store(p_tail[:, None] + (o_d - PLAIN)[None, :], encode_bf16(b_y.to(tl.float32)), mask=m_tail)
    p_scale = p_row + (PLAIN + 4 * P)
    m_scale = m_n[:, None] & (o_g < SCALES)[None, :]
    tl.store(p_scale[:, None] + o_g[None, :], b_scale.to(tl.uint8), mask=m_scale)
    o_rest = tl.arange(0, 16)
    m_rest = m_n[:, None] & (o_rest < -(PLAIN + 4 * P + SCALES) % 16)[None, :]
    b_rest = tl.zeros((BLOCK_N, 16), dtype=tl.uint8)
    tl.store((p_scale + SCALES)[:, None] + o_rest[None, :], b_rest, mask=m_rest)


def norm_rope_config(width: int) -> dict[str, int]:
    """Tile of `norm_rope_kernel` for rows of some width."""
    block = triton.next_power_of_2(width)
    return {"BLOCK_N": max(1, ELEMENTS // block), "BLOCK_D": block, "num_warps": max(4, block // 1024)}


def norm_rope(
    x_THD: torch.Tensor,
    weight_D: torch.Tensor | None,
    eps: float,
    cos_TP: torch.Tensor,
    sin_TP: torch.Tensor,
    *,
    out_NX: torch.Tensor | None = None,
) -> torch.Tensor:
    """`apply_rope(rms_norm(x, weight, eps), cos, sin)`, as `[T, H, D]` of x's dtype, or written to `out_NX`.

    out_NX: rows `[T H, D]` of any float dtype, or uint8 `[T H, B]` for the format of `kernels.fp8_rows`.
    """
    return _launch(x_THD, weight_D, eps, cos_TP, sin_TP, out_NX, norm=True)


def rms_norm(x_D: torch.Tensor, weight_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    """As `kernels.norm.rms_norm`."""
    rows_N1D = x_D.reshape(-1, 1, x_D.shape[-1])
    return _launch(rows_N1D, weight_D, eps, None, None, None, norm=True).view(x_D.shape)


def apply_rope(
    x_THD: torch.Tensor, cos_TP: torch.Tensor, sin_TP: torch.Tensor, *, out_NX: torch.Tensor | None = None
) -> torch.Tensor:
    """As `kernels.rope.apply_rope`, or written to `out_NX` as by `norm_rope`."""
    return _launch(x_THD, None, 0.0, cos_TP, sin_TP, out_NX, norm=False)


def _launch(
    x_THD: torch.Tensor,
    weight_D: torch.Tensor | None,
    eps: float,
    cos_TP: torch.Tensor | None,
    sin_TP: torch.Tensor | None,
    out_NX: torch.Tensor | None,
    *,
    norm: bool,
) -> torch.Tensor:
    num_nodes, num_heads, width = x_THD.shape
    num_rows = num_nodes * num_heads
    assert x_THD.dtype != torch.float64, "kernels compute in float32"
    assert x_THD.stride(2) == 1, "channels of a head lie together"
    output = x_THD.new_empty(x_THD.shape) if out_NX is None else out_NX
    if not num_rows:
        return output
    config = norm_rope_config(width)
    norm_rope_kernel[(triton.cdiv(num_rows, config["BLOCK_N"]),)](
        x_THD,
        weight_D,
        None if cos_TP is None else cos_TP.contiguous(),
        None if sin_TP is None else sin_TP.contiguous(),
        output,
        num_rows,
        num_heads,
        x_THD.stride(0),
        x_THD.stride(1),
        width if out_NX is None else out_NX.stride(0),
        eps,
        D=width,
        P=0 if cos_TP is None else cos_TP.shape[-1],
        NORM=norm,
        FP8_GROUP=fp8_rows.GROUP if output.dtype == torch.uint8 else 0,
        **config,
    )
    return output
