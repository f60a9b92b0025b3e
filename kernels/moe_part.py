"""Some of a layer's experts: what one process adds to the sum where the experts lie on several.

T = nodes, D = model width, E = experts here, F = expert width, K = experts a token, N = T K (node, choice) pairs,
P = pairs whose expert is here
"""

import torch

from compressed_spec.kernels.moe import Routing, routed_experts
from compressed_spec.kernels.numerics import Numerics


def some_experts(
    x_TD: torch.Tensor,
    routing: Routing,
    own: range,
    w13_EFD: torch.Tensor,
    w2_EDF: torch.Tensor,
    limit: float,
    numerics: Numerics,
) -> torch.Tensor:
    """`routed_experts` without the experts that are not in `own`, whose weights are not here.

    Every pair of a node and an expert of ours is processed as a node with a single expert, and added to its node in the
    order of that node's list.
    """
    chosen_N, weights_N = routing.experts_TK.flatten(), routing.weights_TK.flatten()
    pair_P = ((chosen_N >= own.start) & (chosen_N < own.stop)).nonzero()[:, 0]
    output_ND = weights_N.new_zeros(len(chosen_N), x_TD.shape[1])
    if len(pair_P):
        mine = Routing(experts_TK=chosen_N[pair_P].unsqueeze(1) - own.start, weights_TK=weights_N[pair_P].unsqueeze(1))
        num_chosen = routing.experts_TK.shape[1]
        x_PD = x_TD[pair_P // num_chosen]
        output_ND.index_copy_(0, pair_P, routed_experts(x_PD, mine, w13_EFD, w2_EDF, limit, numerics))
    total_TD: torch.Tensor = output_ND.unflatten(0, routing.experts_TK.shape).sum(dim=1)
    return total_TD
