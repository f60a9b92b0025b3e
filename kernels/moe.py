"""Mixture of experts: routing and the gated experts.

T = nodes, D = model width, E = experts, F = expert width, K = experts a token, N = T K
"""

from dataclasses import dataclass

import torch

from compressed_spec.kernels.numerics import Numerics


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """The experts of each node, int64 `[T, K]`, and their weights, float32 or wider."""

    experts_TK: torch.Tensor
    weights_TK: torch.Tensor


def router_scores(x_TD: torch.Tensor, gate_ED: torch.Tensor, numerics: Numerics) -> torch.Tensor:
    """`sqrt(softplus(x . gate))`, float32 or wider, `[T, E]`."""
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    return numerics.softplus(numerics.linear(x_TD.to(wide), gate_ED.to(wide))).sqrt()


def route(scores_TE: torch.Tensor, experts_TK: torch.Tensor, scaling: float) -> Routing:
    """Weights of chosen experts: their own scores (without the selection bias), normalised to `scaling`."""
    weights_TK = scores_TE.gather(1, experts_TK)
    return Routing(experts_TK=experts_TK, weights_TK=weights_TK / weights_TK.sum(-1, keepdim=True) * scaling)


def swiglu(gate: torch.Tensor, up: torch.Tensor, limit: float, numerics: Numerics) -> torch.Tensor:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)`."""
    return numerics.silu(gate.clamp(max=limit)) * up.clamp(min=-limit, max=limit)


def routed_experts(
    x_TD: torch.Tensor,
    routing: Routing,
    w13_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    limit: float,
    numerics: Numerics,
) -> torch.Tensor:
    """Sum of each node's experts, `[T, D]`, in float32 or wider; w13 is gate then up, `[E, 2 F, D]`.

    Each expert runs once, on all of its nodes. A node's outputs are added in the order of its own list of experts, so
    that the sum does not depend on whom the other nodes chose.
    """
    num_chosen, wide = routing.experts_TK.shape[1], routing.weights_TK.dtype
    flat_experts = routing.experts_TK.flatten()
    order = flat_experts.argsort(stable=True)
    x_ND, weights_N1 = x_TD[order // num_chosen], routing.weights_TK.flatten()[order].unsqueeze(1)
    outputs, end = [], 0
    for expert, count in enumerate(torch.bincount(flat_experts, minlength=w13_EFD.shape[0]).tolist()):
        if count == 0:
            continue
        first, end = end, end + count
        gate, up = numerics.linear(x_ND[first:end], w13_EFD[expert]).to(wide).chunk(2, dim=-1)
        # The routing weight goes in before the down projection, as in the reference.
        hidden = swiglu(gate, up, limit, numerics) * weights_N1[first:end]
        outputs.append(numerics.linear(hidden.to(x_TD.dtype), w2_EDF[expert]))
    by_choice_TKD = torch.cat(outputs).to(wide)[order.argsort()].unflatten(0, (-1, num_chosen))
    output_TD: torch.Tensor = by_choice_TKD[:, 0]
    for k in range(1, num_chosen):
        output_TD = output_TD + by_choice_TKD[:, k]
    return output_TD
