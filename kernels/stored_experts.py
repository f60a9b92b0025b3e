"""The routed experts over weights as they are stored (plain torch: an expert's are decoded when it runs).

T = nodes, D = model width, E = experts, F = expert width, K = experts a token
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F

from compressed_spec.kernels.dequantize import dequantize_fp4, dequantize_fp8
from compressed_spec.kernels.moe import Routing


class StoredFormat(StrEnum):
    """How weights are stored."""

    FP4 = "fp4"
    FP8 = "fp8"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredExperts:
    """A layer's experts. w13: gate then up, `[E, 2 F, D]`; w2: `[E, D, F]`.

    FP4: E2M1 codes, two a byte (int8, half as wide), one E8M0 scale per row and 32 columns. FP8: float8_e4m3fn, a scale
    (float8_e8m0fnu or float32) a `block`; the blocks of gate and of up are counted each from its own first row.
    Otherwise numbers, without scales.
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor | None
    w2: torch.Tensor
    w2_scale: torch.Tensor | None
    block: tuple[int, int] | None = None

    @property
    def format(self) -> StoredFormat:
        if self.w13_scale is None:
            return StoredFormat.PLAIN
        return StoredFormat.FP4 if self.block is None else StoredFormat.FP8

    def decoded(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """An expert's w13 and w2, float32 where they were codes."""
        if self.w13_scale is None or self.w2_scale is None:
            return self.w13[expert], self.w2[expert]
        if self.block is None:
            w13 = dequantize_fp4(self.w13[expert], self.w13_scale[expert])
            return w13, dequantize_fp4(self.w2[expert], self.w2_scale[expert])
        halves = zip(self.w13[expert].chunk(2), self.w13_scale[expert].chunk(2), strict=True)
        w13 = torch.cat([dequantize_fp8(codes, scale, self.block) for codes, scale in halves])
        return w13, dequantize_fp8(self.w2[expert], self.w2_scale[expert], self.block)


def stored_experts(
    x_TD: torch.Tensor,
    routing: Routing,
    experts: StoredExperts,
    limit: float,
    plus_TD: torch.Tensor | None = None,
) -> torch.Tensor:
    """What `routed_experts` gives for the decoded weights: `[T, D]`, in float32 or wider.

    Activations are not quantised. The routing weight goes in before w2, and a node's experts are added in the order of
    its own list. With `plus_TD` (the shared expert's output), that is added last, and the sum rounded to x's dtype.
    """
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    num_nodes, num_chosen = routing.experts_TK.shape
    by_choice_TKD = x_TD.new_zeros((num_nodes, num_chosen, x_TD.shape[1]), dtype=wide)
    for e in routing.experts_TK.unique().tolist():
        node, choice = (routing.experts_TK == e).nonzero(as_tuple=True)
        w13, w2 = (weight.to(x_TD.dtype) for weight in experts.decoded(e))
        gate, up = F.linear(x_TD[node], w13).to(wide).chunk(2, dim=-1)
        hidden = F.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)
        hidden = hidden * routing.weights_TK[node, choice].to(wide).unsqueeze(1)
        by_choice_TKD[node, choice] = F.linear(hidden.to(x_TD.dtype), w2).to(wide)
    output_TD: torch.Tensor = by_choice_TKD[:, 0]
    for k in range(1, num_chosen):
        output_TD = output_TD + by_choice_TKD[:, k]
    return output_TD if plus_TD is None else (output_TD + plus_TD.to(wide)).to(x_TD.dtype)
