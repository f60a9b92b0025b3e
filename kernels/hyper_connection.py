"""Manifold-constrained hyper-connections: M residual streams, collapsed into a block's input and mixed with its output.

T = nodes, M = streams (hc_mult), D = model width
"""

from dataclasses import dataclass

import torch

from compressed_spec.kernels.numerics import Numerics


@dataclass(frozen=True, slots=True, kw_only=True)
class MixWeights:
    """What one block does with the streams: `pre_TM` collapses them, `post_TM` spreads the output, `comb_TMM` mixes."""

    pre_TM: torch.Tensor
    post_TM: torch.Tensor
    comb_TMM: torch.Tensor


def _projected(streams_TMD: torch.Tensor, fn: torch.Tensor, norm_eps: float, numerics: Numerics) -> torch.Tensor:
    wide = torch.promote_types(streams_TMD.dtype, torch.float32)
    flat = streams_TMD.flatten(1).to(wide)
    return numerics.linear(flat, fn.to(wide)) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)


def sinkhorn(logits_TMM: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
    """A doubly stochastic matrix a node: row softmax, then alternating column and row sums (`iterations` columns)."""
    comb = torch.softmax(logits_TMM, dim=-1) + eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    return comb


def mix_weights(
    streams_TMD: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
    numerics: Numerics,
) -> MixWeights:
    """The three mixing weights of a block, float32 or wider (fn `[(2+M)M, M D]`, base `[(2+M)M]`, scale `[3]`)."""
    num_streams = streams_TMD.shape[1]
    mixed = _projected(streams_TMD, fn, norm_eps, numerics)
    pre, post, comb = mixed.split((num_streams, num_streams, num_streams**2), dim=-1)
    pre_base, post_base, comb_base = base.to(mixed.dtype).split((num_streams, num_streams, num_streams**2))
    scales = scale.to(mixed.dtype)
    comb_logits = (comb * scales[2] + comb_base).unflatten(-1, (num_streams, num_streams))
    return MixWeights(
        pre_TM=numerics.sigmoid(pre * scales[0] + pre_base) + eps,
        post_TM=2.0 * numerics.sigmoid(post * scales[1] + post_base),
        comb_TMM=sinkhorn(comb_logits, iterations, eps),
    )


def collapse(streams_TMD: torch.Tensor, pre_TM: torch.Tensor) -> torch.Tensor:
    """A block's input `[T, D]`: the streams weighted by `pre_TM`."""
    return (pre_TM.unsqueeze(-1) * streams_TMD.to(pre_TM.dtype)).sum(dim=1).to(streams_TMD.dtype)


def expand(output_TD: torch.Tensor, streams_TMD: torch.Tensor, weights: MixWeights, numerics: Numerics) -> torch.Tensor:
    """The next streams: `post_k output + sum_j comb_jk stream_j` (the sum runs over comb's first stream axis)."""
    wide = weights.comb_TMM.dtype
    mixed = numerics.bmm(weights.comb_TMM.transpose(1, 2), streams_TMD.to(wide))
    return (weights.post_TM.unsqueeze(-1) * output_TD.to(wide).unsqueeze(1) + mixed).to(streams_TMD.dtype)


def head_weights(
    streams_TMD: torch.Tensor,
    fn: torch.Tensor,
    scale: torch.Tensor,
    base: torch.Tensor,
    *,
    eps: float,
    norm_eps: float,
    numerics: Numerics,
) -> torch.Tensor:
    """`pre_TM` of the final collapse before the output norm (fn `[M, M D]`, base `[M]`, scale `[1]`)."""
    mixed = _projected(streams_TMD, fn, norm_eps, numerics)
    return numerics.sigmoid(mixed * scale.to(mixed.dtype) + base.to(mixed.dtype)) + eps
