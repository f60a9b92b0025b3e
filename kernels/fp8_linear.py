"""Products with weights that stay block-scaled FP8 (plain torch: decoded for the product).

T = rows of x, D = input width, O = output width, G = groups, B, C = row and column blocks of scales
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from compressed_spec.kernels.dequantize import dequantize_fp8


@dataclass(frozen=True, slots=True, kw_only=True)
class FP8Weight:
    """A matrix as stored: codes float8_e4m3fn `[O, D]`, and one scale (float8_e8m0fnu or float32) a block, `[B, C]`."""

    codes: torch.Tensor
    scale: torch.Tensor
    block: tuple[int, int]

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix in a float dtype."""
        return dequantize_fp8(self.codes, self.scale, self.block).to(dtype)


def fp8_linear(x_TD: torch.Tensor, weight: FP8Weight) -> torch.Tensor:
    """`x weight^T` over the last axis, `[..., O]`, in x's dtype. Activations are not quantised."""
    return F.linear(x_TD, weight.decoded(x_TD.dtype))


def fp8_grouped_linear(x_TGD: torch.Tensor, weight: FP8Weight) -> torch.Tensor:
    """One product a group, `[T, G, O / G]`: the weight's rows are the groups', one after the other."""
    weight_GOD = weight.decoded(x_TGD.dtype).unflatten(0, (x_TGD.shape[1], -1))
    return torch.einsum("tgd,god->tgo", x_TGD, weight_GOD)
