"""The routed experts over weights that stay packed FP4 (plain torch: an expert's weights are decoded when it runs).

T = nodes, D = model width, E = experts, F = expert width, K = experts a token
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from compressed_spec.kernels.dequantize import dequantize_fp4
from compressed_spec.kernels.moe import Routing


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedExperts:
    """A layer's experts as stored: E2M1 codes, two a byte (int8), one E8M0 scale per row and 32 columns.

    w13: gate then up, `[E, 2 F, D / 2]`, its scale `[E, 2 F, D / 32]`. w2: `[E, D, F / 2]`, its scale
    `[E, D, F / 32]`.
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor


def fp4_experts(
    x_TD: torch.Tensor,
    routing: Routing,
    experts: PackedExperts,
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
        w13 = dequantize_fp4(experts.w13[e], experts.w13_scale[e]).to(x_TD.dtype)
        w2 = dequantize_fp4(experts.w2[e], experts.w2_scale[e]).to(x_TD.dtype)
        gate, up = F.linear(x_TD[node], w13).to(wide).chunk(2, dim=-1)
        hidden = F.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)
        hidden = hidden * routing.weights_TK[node, choice].to(wide).unsqueeze(1)
        by_choice_TKD[node, choice] = F.linear(hidden.to(x_TD.dtype), w2).to(wide)
    output_TD: torch.Tensor = by_choice_TKD[:, 0]
    for k in range(1, num_chosen):
        output_TD = output_TD + by_choice_TKD[:, k]
    return output_TD if plus_TD is None else (output_TD + plus_TD.to(wide)).to(x_TD.dtype)
