"""Pooling of compressor windows on a GPU, one entry a program; normed, rotated and written where it belongs, if asked.

R = pool rows, C = windows closed, K = tokens pooled, E = entry width, P = rotated pairs
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from compressed_spec.kernels import fp8_rows
from compressed_spec.kernels.norm_rope_triton import rotate, store_fp8_rows

TRITON_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
CONFIG = {"BLOCK_K": 8, "num_warps": 8, "num_stages": 3}


@triton.jit
def pool_windows_kernel(
    p_buffer,
    p_rows,
    p_weight,
    p_cos,
    p_sin,
    p_out,
    p_out_rows,
    stride_buffer,
    stride_out,
    eps,
    K: tl.constexpr,
    E: tl.constexpr,
    P: tl.constexpr,
    OVERLAP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    DTYPE: tl.constexpr,
    FP8_GROUP: tl.constexpr,
):
    """p_weight None: pooled entries, float32. Else also normed and rotated, to the rows of p_out_rows (-1: nowhere).

    DTYPE: of what is pooled and normed. FP8_GROUP: rows of bytes, with a scale for so many plain channels; 0: of DTYPE.

    OVERLAP: buffer rows are `kv | gate` of 2 E each; the first K / 2 tokens give their first E channels, the others
    their last.
    """
    i_c = tl.program_id(0).to(tl.int64)
    i_out = i_c
    if p_out_rows is not None:
        i_out = tl.load(p_out_rows + i_c)
        if i_out < 0:
            return
    WIDTH: tl.constexpr = 2 * E if OVERLAP else E
    o_e = tl.arange(0, BLOCK_E)
    b_peak = tl.full((BLOCK_E,), -1e30, dtype=tl.float32)
    b_total = tl.zeros((BLOCK_E,), dtype=tl.float32)
    b_sum = tl.zeros((BLOCK_E,), dtype=tl.float32)
    for i in range(0, K, BLOCK_K):
        o_k = i + tl.arange(0, BLOCK_K)
        b_row = tl.load(p_rows + i_c * K + o_k, mask=o_k < K, other=-1)
        m_ke = (b_row >= 0)[:, None] & (o_e < E)[None, :]
        o_ke = (b_row * stride_buffer)[:, None] + o_e[None, :]
        if OVERLAP:
            o_ke += tl.where(o_k < K // 2, 0, E)[:, None]
        b_kv = tl.load(p_buffer + o_ke, mask=m_ke, other=0.0)
        b_gate = tl.load(p_buffer + WIDTH + o_ke, mask=m_ke, other=float("-inf"))
        b_new = tl.maximum(b_peak, tl.max(b_gate, axis=0))
        b_fade, b_part = tl.exp(b_peak - b_new), tl.exp(b_gate - b_new[None, :])
        b_total = b_total * b_fade + tl.sum(b_part, axis=0)
        b_sum = b_sum * b_fade + tl.sum(b_part * b_kv, axis=0)
        b_peak = b_new
    b_entry = (b_sum / b_total)[None, :]
    m_one = tl.full((1,), 1, dtype=tl.int1)
    p_entry = p_out + i_out * stride_out + o_e[None, :]
    m_e = (o_e < E)[None, :]
    if p_weight is not None:
        b_entry = tl.where(m_e, b_entry, 0.0).to(DTYPE).to(tl.float32)
        b_entry = b_entry * tl.rsqrt(tl.sum(b_entry * b_entry, axis=1) / E + eps)[:, None]
        b_entry = b_entry * tl.load(p_weight + o_e, mask=o_e < E, other=0.0).to(tl.float32)[None, :]
        b_entry = b_entry.to(DTYPE).to(tl.float32)
        o_one = i_c + tl.zeros((1,), dtype=tl.int64)
        b_entry = rotate(b_entry, p_cos + o_one * P, p_sin + o_one * P, m_one, E, P)
    if FP8_GROUP:
        p_row = p_out + i_out * stride_out + tl.zeros((1,), dtype=tl.int64)
        store_fp8_rows(p_row, b_entry.to(DTYPE), m_one, E, P, FP8_GROUP)
    else:
        tl.store(p_entry, b_entry.to(p_out.dtype.element_ty), mask=m_e)


def pool_windows(buffer_RD: torch.Tensor, rows_CK: torch.Tensor, *, overlap: bool) -> torch.Tensor:
    """As `kernels.compress.pool_windows`, of a float32 buffer."""
    entries_CE = buffer_RD.new_empty(len(rows_CK), buffer_RD.shape[1] // (4 if overlap else 2))
    _launch(buffer_RD, rows_CK, overlap, entries_CE, None, None, 0.0, None, None, torch.float32)
    return entries_CE


def pool_entries(
    buffer_RD: torch.Tensor,
    rows_CK: torch.Tensor,
    weight_E: torch.Tensor,
    eps: float,
    cos_CP: torch.Tensor,
    sin_CP: torch.Tensor,
    out_RE: torch.Tensor,
    out_rows_C: torch.Tensor,
    *,
    overlap: bool,
    dtype: torch.dtype,
) -> None:
    """`apply_rope(rms_norm(pool_windows(...).to(dtype), weight, eps), cos, sin)`, written to rows of `out_RE`.

    out_RE: of dtype, or uint8 for the format of `kernels.fp8_rows`. A window whose row of `out_rows_C` is -1 does not
    close, and nothing is written.
    """
    assert out_RE.dtype in (dtype, torch.uint8), "rows in the dtype, or packed"
    _launch(buffer_RD, rows_CK, overlap, out_RE, out_rows_C, weight_E, eps, cos_CP, sin_CP, dtype)


def pool_config(width: int) -> dict[str, int]:
    """Tile of `pool_windows_kernel` for entries of some width."""
    return {"BLOCK_E": triton.next_power_of_2(width), **CONFIG}


def _launch(
    buffer_RD: torch.Tensor,
    rows_CK: torch.Tensor,
    overlap: bool,
    out_RE: torch.Tensor,
    out_rows_C: torch.Tensor | None,
    weight_E: torch.Tensor | None,
    eps: float,
    cos_CP: torch.Tensor | None,
    sin_CP: torch.Tensor | None,
    dtype: torch.dtype,
) -> None:
    assert buffer_RD.dtype == torch.float32, "compressors keep float32 rows"
    num_windows, num_tokens = rows_CK.shape
    width = out_RE.shape[1] if weight_E is None else len(weight_E)
    if not num_windows:
        return
    pool_windows_kernel[(num_windows,)](
        buffer_RD,
        rows_CK.contiguous(),
        weight_E,
        None if cos_CP is None else cos_CP.contiguous(),
        None if sin_CP is None else sin_CP.contiguous(),
        out_RE,
        out_rows_C,
        buffer_RD.stride(0),
        out_RE.stride(0),
        eps,
        K=num_tokens,
        E=width,
        P=0 if cos_CP is None else cos_CP.shape[-1],
        OVERLAP=overlap,
        DTYPE=TRITON_DTYPES[dtype],
        FP8_GROUP=fp8_rows.GROUP if out_RE.dtype == torch.uint8 else 0,
        **pool_config(width),
    )
