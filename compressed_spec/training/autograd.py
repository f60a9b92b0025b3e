"""Two operations with hand-written gradients, because autograd's own are slow on a CPU.

T = tokens, D = model width, K = experts a token, N = T K, P = padded rows, E = experts, F = expert width,
M = residual streams
"""

from typing import Any

import torch
import torch.nn.functional as F

GROUP = 64


class Sinkhorn(torch.autograd.Function):
    """`kernels.hyper_connection.sinkhorn` on logits `[M, M, T]`; its backward undoes one division after the other."""

    @staticmethod
    def forward(ctx: Any, logits_MMT: torch.Tensor, iterations: int, eps: float) -> torch.Tensor:
        comb = torch.softmax(logits_MMT, dim=1).add_(eps)
        sums = []
        for half in range(2 * iterations - 1):
            sums.append(comb.sum(dim=half % 2, keepdim=True).add_(eps))
            comb.div_(sums[-1])
        ctx.save_for_backward(comb, *sums)
        ctx.eps = eps
        return comb

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        comb, *sums = ctx.saved_tensors
        grad, comb = grads[0].clone(), comb.clone()
        for half in reversed(range(len(sums))):
            grad.sub_((grad * comb).sum(dim=half % 2, keepdim=True)).div_(sums[half])
            comb.mul_(sums[half])
        probs = comb.sub_(ctx.eps)
        return probs * (grad - (grad * probs).sum(dim=1, keepdim=True)), None, None


class GroupedExperts(torch.autograd.Function):
    """`kernels.moe.routed_experts` of float32 tokens, gathering both ways instead of scattering.

    Each expert's group is padded to a multiple of GROUP rows of weight 0: a CPU's matrix kernels are made anew for
    every shape that they have not met.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        weights_TK: torch.Tensor,
        experts_TK: torch.Tensor,
        w13_EFD: torch.Tensor,
        w2_EDF: torch.Tensor,
        limit: float,
    ) -> torch.Tensor:
        num_tokens, topk = experts_TK.shape
        flat = experts_TK.flatten()
        groups, slots_N, size = _padded_groups(flat, len(w13_EFD))
        nodes_P = torch.zeros(size, dtype=torch.int64)
        nodes_P[slots_N] = torch.arange(len(flat)) // topk
        weights_P1 = weights_TK.new_zeros(size, 1)
        weights_P1[slots_N, 0] = weights_TK.flatten()
        x_PD = x_TD.index_select(0, nodes_P)
        gate_up_PF = x_PD.new_empty(size, w13_EFD.shape[1])
        for expert, group in groups:
            torch.mm(x_PD[group], w13_EFD[expert].T, out=gate_up_PF[group])
        gate, up = gate_up_PF.chunk(2, dim=1)
        hidden_PF = F.silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit)).mul_(weights_P1)
        y_PD = torch.empty_like(x_PD)
        for expert, group in groups:
            torch.mm(hidden_PF[group], w2_EDF[expert].T, out=y_PD[group])
        ctx.save_for_backward(x_PD, gate_up_PF, weights_P1, w13_EFD, w2_EDF, nodes_P, slots_N)
        ctx.groups, ctx.limit, ctx.topk = groups, limit, topk
        return y_PD.index_select(0, slots_N).view(num_tokens, topk, -1).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_PD, gate_up_PF, weights_P1, w13_EFD, w2_EDF, nodes_P, slots_N = ctx.saved_tensors
        dy_PD = grads[0].index_select(0, nodes_P)
        dhidden_PF = x_PD.new_empty(len(x_PD), w2_EDF.shape[2])
        dw2_EDF, dw13_EFD = torch.zeros_like(w2_EDF), torch.zeros_like(w13_EFD)
        for expert, group in ctx.groups:
            torch.mm(dy_PD[group], w2_EDF[expert], out=dhidden_PF[group])
        gate, up = gate_up_PF.chunk(2, dim=1)
        capped, clamped = gate.clamp(max=ctx.limit), up.clamp(-ctx.limit, ctx.limit)
        sigmoid = torch.sigmoid(capped)
        silu = capped.mul_(sigmoid)
        active = silu * clamped
        dweights_P = (dhidden_PF * active).sum(1)
        hidden_PF = active.mul_(weights_P1)
        for expert, group in ctx.groups:
            torch.mm(dy_PD[group].T, hidden_PF[group], out=dw2_EDF[expert])
        dactive = dhidden_PF.mul_(weights_P1)
        dgate_up_PF = torch.empty_like(gate_up_PF)
        dgate, dup = dgate_up_PF.chunk(2, dim=1)
        torch.mul(dactive, silu, out=dup).mul_(up.abs() <= ctx.limit)
        slope = (1 - sigmoid).mul_(silu).add_(sigmoid)
        torch.mul(dactive, clamped, out=dgate).mul_(slope).mul_(gate <= ctx.limit)
        dx_PD = torch.empty_like(x_PD)
        for expert, group in ctx.groups:
            torch.mm(dgate_up_PF[group].T, x_PD[group], out=dw13_EFD[expert])
            torch.mm(dgate_up_PF[group], w13_EFD[expert], out=dx_PD[group])
        dx_TD = dx_PD.index_select(0, slots_N).view(-1, ctx.topk, x_PD.shape[1]).sum(1)
        dweights_TK = dweights_P.index_select(0, slots_N).view(-1, ctx.topk)
        return dx_TD, dweights_TK, None, dw13_EFD, dw2_EDF, None


def _padded_groups(experts_N: torch.Tensor, num_experts: int) -> tuple[list[tuple[int, slice]], torch.Tensor, int]:
    """Experts that got tokens with their padded rows, the padded row of each (token, choice), and how many rows."""
    counts = torch.bincount(experts_N, minlength=num_experts)
    padded = (counts + GROUP - 1) // GROUP * GROUP
    ends = padded.cumsum(0)
    order_N = experts_N.argsort(stable=True)
    sorted_N = experts_N[order_N]
    before = (ends - padded) - (counts.cumsum(0) - counts)  # padded start less plain start
    slots_N = torch.empty_like(order_N)
    slots_N[order_N] = torch.arange(len(order_N)) + before[sorted_N]
    stops, sizes = ends.tolist(), padded.tolist()
    groups = [(e, slice(stops[e] - sizes[e], stops[e])) for e in range(num_experts) if sizes[e]]
    return groups, slots_N, stops[-1]
