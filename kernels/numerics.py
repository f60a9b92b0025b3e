"""Two ways to carry out a model: as fast as torch can, or so that the bits of a row are its own.

The second gives the same tokens, logits and state, bit for bit, with speculation or without, in any tree, batch or
prefill chunk, on a CPU. The two differ by rounding alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from compressed_spec.kernels import rowwise
from compressed_spec.kernels.attention import rowwise_attention, sparse_attention
from compressed_spec.kernels.indexer import index_scores, rowwise_index_scores

Unary = Callable[[torch.Tensor], torch.Tensor]
Binary = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Every operation for which it matters; of all others a row's bits do not depend on its neighbours anyway.

    row_tile: rows of a product, or 1 if it may have any number. linear: `x [..., D]`, `weight [O, D]`. grouped_linear:
    `x [T, G, D]`, `weight [G, O, D]`. bmm: as torch's. attention, index_scores: see the files of these names.
    """

    row_tile: int
    linear: Binary
    grouped_linear: Binary
    bmm: Binary
    sigmoid: Unary
    silu: Unary
    softplus: Unary
    attention: Callable[..., torch.Tensor]
    index_scores: Callable[..., torch.Tensor]


def numerics_named(name: str) -> Numerics:
    """ "fast" or "invariant". Raises ValueError for any other name."""
    if name == "fast":
        return Numerics(
            row_tile=1,
            linear=F.linear,
            grouped_linear=_grouped_linear,
            bmm=torch.bmm,
            sigmoid=torch.sigmoid,
            silu=F.silu,
            softplus=F.softplus,
            attention=sparse_attention,
            index_scores=index_scores,
        )
    if name == "invariant":
        return Numerics(
            row_tile=rowwise.ROW_TILE,
            linear=rowwise.linear,
            grouped_linear=rowwise.grouped_linear,
            bmm=rowwise.bmm,
            sigmoid=rowwise.sigmoid,
            silu=rowwise.silu,
            softplus=rowwise.softplus,
            attention=rowwise_attention,
            index_scores=rowwise_index_scores,
        )
    raise ValueError(f"Unknown numerics {name!r}: use 'fast' or 'invariant'.")


def _grouped_linear(x_TGD: torch.Tensor, weight_GOD: torch.Tensor) -> torch.Tensor:
    return torch.einsum("tgd,god->tgo", x_TGD, weight_GOD)
