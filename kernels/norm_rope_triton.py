"""RMS norm and rotary embedding of heads in one pass, stored as they are or as FP8 rows.

T = nodes, H = heads, D = head width, P = rotated pairs, N = T H rows, G = groups that share an FP8 scale
"""

import triton
import triton.language as tl

ROW_WORDS = 4096  # elements a program holds


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
    eps,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NORM: tl.constexpr,
):
    """NORM: divide by the root mean square (and multiply by the weight, unless p_weight is None). P = 0: no rotation."""
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
        o_p = tl.arange(0, BLOCK_D // 2) - (D // 2 - P)
        m_np = m_n[:, None] & ((o_p >= 0) & (o_p < P))[None, :]
        o_np = i_t[:, None] * P + o_p[None, :]
        b_cos = tl.load(p_cos + o_np, mask=m_np, other=1.0)
        b_sin = tl.load(p_sin + o_np, mask=m_np, other=0.0)
        b_even, b_odd = tl.split(tl.reshape(b_y, (BLOCK_N, BLOCK_D // 2, 2)))
        b_even, b_odd = b_even * b_cos - b_odd * b_sin, b_even * b_sin + b_odd * b_cos
        b_y = tl.reshape(tl.join(b_even, b_odd), (BLOCK_N, BLOCK_D))
    tl.store(p_out + o_n.to(tl.int64)[:, None] * D + o_d[None, :], b_y.to(p_out.dtype.element_ty), mask=m_nd)


def norm_rope_config(width: int) -> dict[str, int]:
    """Tile of `norm_rope_kernel` for rows of some width."""
    block = triton.next_power_of_2(width)
    return {"BLOCK_N": max(1, ROW_WORDS // block), "BLOCK_D": block, "num_warps": max(4, block // 1024)}
