"""Hyper-connections on a GPU: three kernels a site, of which two run before its block and one after.

The projection of all streams is cut along its inner axis, because it has few outputs; its parts are added in their
order by the kernel that makes the weights, with Sinkhorn's iterations in registers, and collapses the streams.

T = nodes, M = streams, D = model width, I = M D, F = outputs of the projection, S = parts
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from compressed_spec.kernels.hyper_connection import MixWeights
from compressed_spec.kernels.numerics import Numerics
from compressed_spec.kernels.triton_device import multiprocessors

PROJECT = {"BLOCK_T": 16, "BLOCK_I": 128, "num_warps": 4, "num_stages": 3}
STREAMS = {"BLOCK_D": 1024, "num_warps": 4}


@triton.jit(do_not_specialize=["num_nodes"])
def project_streams_kernel(
    p_x,
    p_fn,
    p_part,
    num_nodes,
    inner,
    blocks_a_part,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Grid (node tiles, parts). A part is F products and, last, the sum of squares of its share of the streams."""
    i_s = tl.program_id(1)
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_f = tl.arange(0, BLOCK_F)
    m_t, m_f = o_t < num_nodes, o_f < F
    p_x += o_t.to(tl.int64)[:, None] * inner
    b_part = tl.zeros((BLOCK_T, BLOCK_F), dtype=tl.float32)
    b_square = tl.zeros((BLOCK_T,), dtype=tl.float32)
    first = i_s * blocks_a_part
    for i in range(first, tl.minimum(first + blocks_a_part, tl.cdiv(inner, BLOCK_I))):
        o_i = i * BLOCK_I + tl.arange(0, BLOCK_I)
        m_i = (o_i < inner)[None, :]
        b_x = tl.load(p_x + o_i[None, :], mask=m_t[:, None] & m_i, other=0.0).to(tl.float32)
        b_fn = tl.load(p_fn + o_f[:, None] * inner + o_i[None, :], mask=m_f[:, None] & m_i, other=0.0)
        # Three products of TF32 halves: float32's precision on tensor cores.
        b_part = tl.dot(b_x, tl.trans(b_fn), b_part, input_precision="tf32x3")
        b_square += tl.sum(b_x * b_x, axis=1)
    p_part += (i_s.to(tl.int64) * num_nodes + o_t)[:, None] * (F + 1)
    tl.store(p_part + o_f[None, :], b_part, mask=m_t[:, None] & m_f[None, :])
    tl.store(p_part + F + tl.zeros((1, 1), dtype=tl.int32), b_square[:, None], mask=m_t[:, None])


@triton.jit(do_not_specialize=["num_parts"])
def mix_streams_kernel(
    p_part,
    p_scale,
    p_base,
    p_x,
    p_pre,
    p_post,
    p_comb,
    p_out,
    num_parts,
    eps,
    norm_eps,
    M: tl.constexpr,
    D: tl.constexpr,
    MIX: tl.constexpr,
    ITERATIONS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (nodes, blocks of width). A node's weights, and its streams collapsed; without MIX, pre alone (the head)."""
    i_t, i_d = tl.program_id(0).to(tl.int64), tl.program_id(1)
    F: tl.constexpr = M * (M + 2) if MIX else M
    o_m = tl.arange(0, BLOCK_M)
    o_mm = o_m[:, None] * M + o_m[None, :]
    m_m = o_m < M
    m_mm = m_m[:, None] & m_m[None, :]
    b_square = tl.zeros((1,), dtype=tl.float32)
    b_pre, b_post = tl.zeros((BLOCK_M,), dtype=tl.float32), tl.zeros((BLOCK_M,), dtype=tl.float32)
    b_comb = tl.zeros((BLOCK_M, BLOCK_M), dtype=tl.float32)
    for i in range(num_parts):
        p = p_part + (i * tl.num_programs(0).to(tl.int64) + i_t) * (F + 1)
        b_square += tl.load(p + F + tl.zeros((1,), dtype=tl.int32))
        b_pre += tl.load(p + o_m, mask=m_m, other=0.0)
        if MIX:
            b_post += tl.load(p + M + o_m, mask=m_m, other=0.0)
            b_comb += tl.load(p + 2 * M + o_mm, mask=m_mm, other=0.0)
    b_rms = tl.rsqrt(b_square / (M * D) + norm_eps)
    b_pre = b_pre * b_rms * tl.load(p_scale) + tl.load(p_base + o_m, mask=m_m, other=0.0)
    b_pre = tl.sigmoid(b_pre) + eps
    if i_d == 0:
        tl.store(p_pre + i_t * M + o_m, b_pre, mask=m_m)
        if MIX:
            b_post = b_post * b_rms * tl.load(p_scale + 1) + tl.load(p_base + M + o_m, mask=m_m, other=0.0)
            tl.store(p_post + i_t * M + o_m, 2.0 * tl.sigmoid(b_post), mask=m_m)
            b_comb = b_comb * b_rms[:, None] * tl.load(p_scale + 2)
            b_comb += tl.load(p_base + 2 * M + o_mm, mask=m_mm, other=0.0)
            b_comb = _sinkhorn(tl.where(m_mm, b_comb, float("-inf")), m_mm, eps, ITERATIONS)
            tl.store(p_comb + i_t * (M * M) + o_mm, b_comb, mask=m_mm)
    if p_out is not None:
        o_d = i_d * BLOCK_D + tl.arange(0, BLOCK_D)
        m_md = m_m[:, None] & (o_d < D)[None, :]
        b_x = tl.load(p_x + i_t * (M * D) + o_m[:, None] * D + o_d[None, :], mask=m_md, other=0.0)
        b_out = tl.sum(b_pre[:, None] * b_x.to(tl.float32), axis=0)
        tl.store(p_out + i_t * D + o_d, b_out.to(p_out.dtype.element_ty), mask=o_d < D)


@triton.jit
def _sinkhorn(b_comb, m_mm, eps, ITERATIONS: tl.constexpr):
    """Rows and columns beyond the streams are -inf at first, then 0, and stay 0."""
    b_peak = tl.max(b_comb, axis=1)
    b_comb = tl.exp(b_comb - tl.where(b_peak > float("-inf"), b_peak, 0.0)[:, None])
    b_comb = b_comb / tl.maximum(tl.sum(b_comb, axis=1), 1e-30)[:, None]
    b_comb = tl.where(m_mm, b_comb + eps, 0.0)
    b_comb = b_comb / (tl.sum(b_comb, axis=0) + eps)[None, :]
    for _ in range(ITERATIONS - 1):
        b_comb = b_comb / (tl.sum(b_comb, axis=1) + eps)[:, None]
        b_comb = b_comb / (tl.sum(b_comb, axis=0) + eps)[None, :]
    return b_comb


@triton.jit
def collapse_kernel(p_x, p_pre, p_out, M: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Grid (nodes, blocks of width)."""
    i_t, o_d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    o_m = tl.arange(0, BLOCK_M)
    m_md = (o_m < M)[:, None] & (o_d < D)[None, :]
    b_pre = tl.load(p_pre + i_t * M + o_m, mask=o_m < M, other=0.0)
    b_x = tl.load(p_x + i_t * (M * D) + o_m[:, None] * D + o_d[None, :], mask=m_md, other=0.0)
    b_out = tl.sum(b_pre[:, None] * b_x.to(tl.float32), axis=0)
    tl.store(p_out + i_t * D + o_d, b_out.to(p_out.dtype.element_ty), mask=o_d < D)


@triton.jit
def expand_kernel(
    p_y,
    p_x,
    p_post,
    p_comb,
    p_out,
    M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (nodes, blocks of width)."""
    i_t, o_d = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    o_m, m_d = tl.arange(0, BLOCK_M), o_d < D
    m_m = o_m < M
    p_x += i_t * (M * D)
    b_post = tl.load(p_post + i_t * M + o_m, mask=m_m, other=0.0)
    b_y = tl.load(p_y + i_t * D + o_d, mask=m_d, other=0.0).to(tl.float32)
    b_mixed = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for j in tl.static_range(M):
        b_comb = tl.load(p_comb + i_t * (M * M) + j * M + o_m, mask=m_m, other=0.0)
        b_x = tl.load(p_x + j * D + o_d, mask=m_d, other=0.0).to(tl.float32)
        b_mixed += b_comb[:, None] * b_x[None, :]
    b_out = b_post[:, None] * b_y[None, :] + b_mixed
    p_out += i_t * (M * D) + o_m[:, None] * D + o_d[None, :]
    tl.store(p_out, b_out.to(p_out.dtype.element_ty), mask=m_m[:, None] & m_d[None, :])


@dataclass(frozen=True, slots=True, kw_only=True)
class Collapsed:
    """A block's input `[T, D]` and what its output will be mixed with."""

    input_TD: torch.Tensor
    weights: MixWeights


def mix_weights(
    streams_TMD: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
    numerics: Numerics | None = None,
) -> MixWeights:
    """As `kernels.hyper_connection.mix_weights`, float32; `numerics` makes no difference here."""
    weights, _ = _mix(streams_TMD, fn, scale, base, iterations, eps, norm_eps, collapse=False)
    return weights


def mix_and_collapse(
    streams_TMD: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> Collapsed:
    """`mix_weights` and `collapse` in two kernels together."""
    weights, input_TD = _mix(streams_TMD, fn, scale, base, iterations, eps, norm_eps, collapse=True)
    return Collapsed(input_TD=input_TD, weights=weights)


def head_weights(
    streams_TMD: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    eps: float,
    norm_eps: float,
    numerics: Numerics | None = None,
) -> torch.Tensor:
    """As `kernels.hyper_connection.head_weights`, float32; `numerics` makes no difference here."""
    weights, _ = _mix(streams_TMD, fn, scale, base, 0, eps, norm_eps, collapse=False)
    return weights.pre_TM


def collapse(streams_TMD: torch.Tensor, pre_TM: torch.Tensor) -> torch.Tensor:
    """As `kernels.hyper_connection.collapse`."""
    num_nodes, num_streams, width = streams_TMD.shape
    output_TD = streams_TMD.new_empty(num_nodes, width)
    if num_nodes:
        grid = (num_nodes, triton.cdiv(width, STREAMS["BLOCK_D"]))
        collapse_kernel[grid](
            streams_TMD.contiguous(), pre_TM.contiguous(), output_TD, D=width, **_streams(num_streams), **STREAMS
        )
    return output_TD


def expand(
    output_TD: torch.Tensor, streams_TMD: torch.Tensor, weights: MixWeights, numerics: Numerics | None = None
) -> torch.Tensor:
    """As `kernels.hyper_connection.expand`; `numerics` makes no difference here."""
    num_nodes, num_streams, width = streams_TMD.shape
    expanded_TMD = streams_TMD.new_empty(streams_TMD.shape)
    if num_nodes:
        expand_kernel[(num_nodes, triton.cdiv(width, STREAMS["BLOCK_D"]))](
            output_TD.contiguous(),
            streams_TMD.contiguous(),
            weights.post_TM.contiguous(),
            weights.comb_TMM.contiguous(),
            expanded_TMD,
            D=width,
            **_streams(num_streams),
            **STREAMS,
        )
    return expanded_TMD


def parts_of(num_tiles: int, num_blocks: int, num_processors: int) -> tuple[int, int]:
    """How many parts an inner axis of blocks is cut into, and blocks a part: enough to occupy the processors."""
    wanted = max(1, min(num_processors // num_tiles, num_blocks))
    blocks_a_part = triton.cdiv(num_blocks, wanted)
    return triton.cdiv(num_blocks, blocks_a_part), blocks_a_part


def _streams(num_streams: int) -> dict[str, int]:
    return {"M": num_streams, "BLOCK_M": triton.next_power_of_2(num_streams)}


def _mix(
    streams_TMD: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    iterations: int,
    eps: float,
    norm_eps: float,
    *,
    collapse: bool,
) -> tuple[MixWeights, torch.Tensor]:
    """Both kernels. iterations 0: the head's, which has `pre_TM` alone. The second is empty unless `collapse`."""
    num_nodes, num_streams, width = streams_TMD.shape
    assert streams_TMD.dtype != torch.float64, "kernels compute in float32"
    assert fn.dtype == scale.dtype == base.dtype == torch.float32, "mixing weights are float32"
    streams_TMD, num_outputs, mixes = streams_TMD.contiguous(), len(fn), iterations > 0
    weights = MixWeights(
        pre_TM=fn.new_empty(num_nodes, num_streams),
        post_TM=fn.new_empty(num_nodes, num_streams if mixes else 0),
        comb_TMM=fn.new_empty(num_nodes, num_streams if mixes else 0, num_streams),
    )
    input_TD = streams_TMD.new_empty(num_nodes if collapse else 0, width)
    if not num_nodes:
        return weights, input_TD
    num_tiles = triton.cdiv(num_nodes, PROJECT["BLOCK_T"])
    num_blocks = triton.cdiv(num_streams * width, PROJECT["BLOCK_I"])
    num_parts, blocks_a_part = parts_of(num_tiles, num_blocks, multiprocessors(fn.device))
    part_STF = fn.new_empty(num_parts, num_nodes, num_outputs + 1)
    project_streams_kernel[(num_tiles, num_parts)](
        streams_TMD,
        fn.contiguous(),
        part_STF,
        num_nodes,
        num_streams * width,
        blocks_a_part,
        F=num_outputs,
        BLOCK_F=max(16, triton.next_power_of_2(num_outputs)),
        **PROJECT,
    )
    mix_streams_kernel[(num_nodes, triton.cdiv(width, STREAMS["BLOCK_D"]) if collapse else 1)](
        part_STF,
        scale,
        base,
        streams_TMD,
        weights.pre_TM,
        weights.post_TM,
        weights.comb_TMM,
        input_TD if collapse else None,
        num_parts,
        eps,
        norm_eps,
        D=width,
        MIX=mixes,
        ITERATIONS=iterations,
        **_streams(num_streams),
        **STREAMS,
    )
    return weights, input_TD
