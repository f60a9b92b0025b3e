"""Two operations with hand-written gradients, because autograd's own are slow on a CPU.

T = tokens, D = model width, K = experts a token, N = T K, E = experts, F = expert width, M = residual streams
"""

from typing import Any

import torch
import torch.nn.functional as F


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
    """`kernels.moe.routed_experts` of float32 tokens, gathering both ways instead of scattering."""

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
        order_N = flat.argsort(stable=True)
        inverse_N = torch.empty_like(order_N)
        inverse_N[order_N] = torch.arange(len(order_N))
        nodes_N = order_N // topk
        ends = torch.bincount(flat, minlength=len(w13_EFD)).cumsum(0).tolist()
        x_ND = x_TD.index_select(0, nodes_N)
        gate_up_NF = x_ND.new_empty(len(order_N), w13_EFD.shape[1])
        for expert, group in _groups(ends):
            torch.mm(x_ND[group], w13_EFD[expert].T, out=gate_up_NF[group])
        weights_N1 = weights_TK.flatten().index_select(0, order_N).unsqueeze(1)
        hidden_NF = _activate(gate_up_NF, limit) * weights_N1
        y_ND = torch.empty_like(x_ND)
        for expert, group in _groups(ends):
            torch.mm(hidden_NF[group], w2_EDF[expert].T, out=y_ND[group])
        ctx.save_for_backward(x_ND, gate_up_NF, weights_N1, w13_EFD, w2_EDF, nodes_N, order_N, inverse_N)
        ctx.ends, ctx.limit, ctx.topk = ends, limit, topk
        return y_ND.index_select(0, inverse_N).view(num_tokens, topk, -1).sum(1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_ND, gate_up_NF, weights_N1, w13_EFD, w2_EDF, nodes_N, order_N, inverse_N = ctx.saved_tensors
        dy_ND = grads[0].index_select(0, nodes_N)
        dhidden_NF = x_ND.new_empty(len(x_ND), w2_EDF.shape[2])
        dw2_EDF, dw13_EFD = torch.zeros_like(w2_EDF), torch.zeros_like(w13_EFD)
        for expert, group in _groups(ctx.ends):
            torch.mm(dy_ND[group], w2_EDF[expert], out=dhidden_NF[group])
        gate, up = gate_up_NF.chunk(2, dim=1)
        capped, clamped = gate.clamp(max=ctx.limit), up.clamp(-ctx.limit, ctx.limit)
        sigmoid = torch.sigmoid(capped)
        silu = capped * sigmoid
        active = silu * clamped
        hidden_NF = active * weights_N1
        for expert, group in _groups(ctx.ends):
            torch.mm(dy_ND[group].T, hidden_NF[group], out=dw2_EDF[expert])
        dweights_N = (dhidden_NF * active).sum(1)
        dactive = dhidden_NF * weights_N1
        dgate = dactive * clamped * (sigmoid + silu * (1 - sigmoid)) * (gate <= ctx.limit)
        dup = dactive * silu * (up.abs() <= ctx.limit)
        dgate_up_NF = torch.cat((dgate, dup), dim=1)
        dx_ND = torch.empty_like(x_ND)
        for expert, group in _groups(ctx.ends):
            torch.mm(dgate_up_NF[group].T, x_ND[group], out=dw13_EFD[expert])
            torch.mm(dgate_up_NF[group], w13_EFD[expert], out=dx_ND[group])
        dx_TD = dx_ND.index_select(0, inverse_N).view(-1, ctx.topk, x_ND.shape[1]).sum(1)
        dweights_TK = dweights_N.index_select(0, inverse_N).view(-1, ctx.topk)
        return dx_TD, dweights_TK, None, dw13_EFD, dw2_EDF, None


def _groups(ends: list[int]) -> list[tuple[int, slice]]:
    """The experts that got tokens, and which."""
    starts = [0, *ends[:-1]]
    return [(e, slice(a, b)) for e, (a, b) in enumerate(zip(starts, ends, strict=True)) if b > a]


def _activate(gate_up_NF: torch.Tensor, limit: float) -> torch.Tensor:
    gate, up = gate_up_NF.chunk(2, dim=1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
