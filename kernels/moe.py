"""Mixture of experts: routing and the gated experts.

T = nodes, D = model width, E = experts, F = expert width, K = experts a token
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The experts of each node, int64 `[T, K]`, and their weights, float32 or wider."""

    experts_TK: torch.Tensor
    weights_TK: torch.Tensor


def router_scores(x_TD: torch.Tensor, gate_ED: torch.Tensor) -> torch.Tensor:
    """`sqrt(softplus(x . gate))`, float32 or wider, `[T, E]`."""
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    return F.softplus(F.linear(x_TD.to(wide), gate_ED.to(wide))).sqrt()


def route(scores_TE: torch.Tensor, experts_TK: torch.Tensor, scaling: float) -> Routing:
    """Weights of chosen experts: their own scores (without the selection bias), normalised to `scaling`."""
    weights_TK = scores_TE.gather(1, experts_TK)
    return Routing(experts_TK=experts_TK, weights_TK=weights_TK / weights_TK.sum(-1, keepdim=True) * scaling)


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float) -> torch.Tensor:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)`."""
    return F.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)


def routed_experts(
    x_TD: torch.Tensor, routing: Routing, w13_EFD: torch.Tensor, w2_EDF: torch.Tensor, limit: float
) -> torch.Tensor:
    """Sum of each node's experts, `[T, D]`, accumulated in float32 or wider; w13 is gate then up, `[E, 2 F, D]`."""
    output_TD = x_TD.new_zeros(x_TD.shape, dtype=routing.weights_TK.dtype)
    flat_experts = routing.experts_TK.flatten()
    order = flat_experts.argsort(stable=True)
    nodes = order // routing.experts_TK.shape[1]
    weights = routing.weights_TK.flatten()[order]
    end = 0
    for expert, count in enumerate(torch.bincount(flat_experts, minlength=w13_EFD.shape[0]).tolist()):
        if count == 0:
            continue
        first, end = end, end + count
        gate, up = F.linear(x_TD[nodes[first:end]], w13_EFD[expert]).to(output_TD.dtype).chunk(2, dim=-1)
        # The routing weight goes in before the down projection, as in the reference.
        hidden = swiglu(gate, up, limit) * weights[first:end, None]
        output_TD = output_TD.index_add(
            0, nodes[first:end], F.linear(hidden.to(x_TD.dtype), w2_EDF[expert]).to(output_TD.dtype)
        )
    return output_TD
