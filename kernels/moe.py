"""Mixture of experts: routing and the gated experts.

T = nodes, D = model width, E = experts, F = expert width, K = experts a token, N = T K (node, choice) pairs,
P = their rows and those that fill up tiles, O = output width
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
    place_N, sizes_E = _places(routing.experts_TK.flatten(), w13_EFD.shape[0], numerics.row_tile)
    x_PD = x_TD.new_zeros(sum(sizes_E), x_TD.shape[1])
    x_PD = x_PD.index_copy(0, place_N, x_TD.repeat_interleave(num_chosen, dim=0))
    weights_P = routing.weights_TK.new_zeros(len(x_PD)).index_copy(0, place_N, routing.weights_TK.flatten())
    gate, up = _by_expert(x_PD, w13_EFD, sizes_E, numerics).to(wide).chunk(2, dim=-1)
    # The routing weight goes in before the down projection, as in the reference.
    hidden_PF = swiglu(gate, up, limit, numerics) * weights_P.unsqueeze(1)
    output_PD = _by_expert(hidden_PF.to(x_TD.dtype), w2_EDF, sizes_E, numerics)
    by_choice_TKD = output_PD[place_N].to(wide).unflatten(0, (-1, num_chosen))
    output_TD: torch.Tensor = by_choice_TKD[:, 0]
    for k in range(1, num_chosen):
        output_TD = output_TD + by_choice_TKD[:, k]
    return output_TD


def gathered_experts(
    x_TD: torch.Tensor,
    routing: Routing,
    w13_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    limit: float,
    numerics: Numerics,
) -> torch.Tensor:
    """`routed_experts` as sums over each pair's own weights: for few nodes, and only where a compiler fuses it.

    Its shapes do not depend on the routing, and nothing waits for it on the host; an expert is read once a pair.
    """
    wide = routing.weights_TK.dtype
    pairs_TKFD = w13_EFD[routing.experts_TK].to(wide)
    gate, up = (pairs_TKFD * x_TD.to(wide)[:, None, None, :]).sum(-1).chunk(2, dim=-1)
    hidden_TKF = swiglu(gate, up, limit, numerics) * routing.weights_TK.unsqueeze(-1)
    # The same tensor, but one that the compiler stores: fused into the next sum, it would be computed anew D times.
    hidden_TKF = hidden_TKF.as_strided(hidden_TKF.shape, hidden_TKF.stride())
    by_choice_TKD = (w2_EDF[routing.experts_TK].to(wide) * hidden_TKF.unsqueeze(2)).sum(-1)
    return by_choice_TKD.sum(1)


def _places(experts_N: torch.Tensor, num_experts: int, tile: int) -> tuple[torch.Tensor, list[int]]:
    """Where each (node, choice) goes when those of an expert lie together, and the rows of each expert.

    An expert's rows are rounded up to a multiple of `tile`.
    """
    order_N = experts_N.argsort(stable=True)
    counts_E = torch.bincount(experts_N, minlength=num_experts)
    sizes_E = (counts_E + tile - 1) // tile * tile
    shift_E = (sizes_E - counts_E).cumsum(0) - (sizes_E - counts_E)
    place_N = torch.empty_like(order_N)
    place_N[order_N] = torch.arange(len(order_N), device=order_N.device) + shift_E[experts_N[order_N]]
    return place_N, sizes_E.tolist()


def _by_expert(x_PD: torch.Tensor, weight_EOD: torch.Tensor, sizes_E: list[int], numerics: Numerics) -> torch.Tensor:
    """Each expert's product on its own rows."""
    parts = x_PD.split(sizes_E)
    # Weights may be kept narrower than x where that loses nothing.
    used = ((part, weight_EOD[e].to(x_PD.dtype)) for e, part in enumerate(parts) if len(part))
    return torch.cat([numerics.linear(part, weight_OD) for part, weight_OD in used])
