"""The router in one launch, from its logits, and the gated activation of an expert that every node takes.

T = nodes, E = experts, K = experts a token, F = expert width
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

from compressed_spec.kernels.moe import Routing

SWIGLU_BLOCK = 1024


@triton.jit
def route_kernel(
    p_logits,
    p_bias,
    p_table,
    p_tokens,
    p_experts,
    p_weights,
    scaling,
    E: tl.constexpr,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Scores sqrt(softplus(logit)); the K best by score + bias, or those of the token's row of the table if there is
    one; their scores, normalised to `scaling`."""
    i_t = tl.program_id(0).to(tl.int64)
    o_e, o_k = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_K)
    m_e = o_e < E
    b_x = tl.load(p_logits + i_t * E + o_e, mask=m_e, other=0.0)
    # log(1 + e) for small e too: the rounding of 1 + e is divided out again.
    b_exp = tl.exp(tl.minimum(b_x, 20.0))
    b_one = 1.0 + b_exp
    b_log = tl.where(b_one == 1.0, b_exp, tl.log(b_one) * (b_exp / tl.where(b_one == 1.0, 1.0, b_one - 1.0)))
    b_score = tl.sqrt(tl.where(b_x > 20.0, b_x, b_log))
    b_chosen = tl.zeros([BLOCK_K], tl.int64)
    b_weight = tl.zeros([BLOCK_K], tl.float32)
    if p_table is None:
        b_rank = tl.where(m_e, b_score + tl.load(p_bias + o_e, mask=m_e, other=0.0), float("-inf"))
    else:
        row = tl.load(p_tokens + i_t) * K
    for k in tl.static_range(K):
        if p_table is None:
            best = tl.argmax(b_rank, 0)
            b_rank = tl.where(o_e == best, float("-inf"), b_rank)
        else:
            best = tl.load(p_table + row + k)
        b_chosen = tl.where(o_k == k, best, b_chosen)
        b_weight = tl.where(o_k == k, tl.sum(tl.where(o_e == best, b_score, 0.0), 0), b_weight)
    b_weight = b_weight / tl.sum(b_weight, 0) * scaling
    tl.store(p_experts + i_t * K + o_k, b_chosen, mask=o_k < K)
    tl.store(p_weights + i_t * K + o_k, b_weight, mask=o_k < K)


def route(
    logits_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    table_VK: torch.Tensor | None,
    tokens_T: torch.Tensor,
    *,
    num_chosen: int,
    scaling: float,
) -> Routing:
    """`router_scores`, the choice and `route` of `kernels.moe`, from float32 logits `x . gate`.

    Either `bias_E`: the best by score and bias, the smallest id on a tie; or `table_VK`: experts of each token id.
    """
    num_nodes, num_experts = logits_TE.shape
    assert table_VK is None or table_VK.is_contiguous(), "a token's experts lie together"
    experts_TK = torch.empty((num_nodes, num_chosen), dtype=torch.int64, device=logits_TE.device)
    weights_TK = logits_TE.new_empty((num_nodes, num_chosen))
    route_kernel[(num_nodes,)](
        logits_TE.contiguous(),
        bias_E,
        table_VK,
        tokens_T,
        experts_TK,
        weights_TK,
        scaling,
        E=num_experts,
        K=num_chosen,
        BLOCK_E=triton.next_power_of_2(num_experts),
        BLOCK_K=triton.next_power_of_2(num_chosen),
    )
    return Routing(experts_TK=experts_TK, weights_TK=weights_TK)


@triton.jit
def swiglu_kernel(p_gate, p_up, p_out, limit, num_elements, BLOCK: tl.constexpr):
    o_n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    m_n = o_n < num_elements
    b_gate = tl.minimum(tl.load(p_gate + o_n, mask=m_n, other=0.0).to(tl.float32), limit)
    b_up = tl.minimum(tl.maximum(tl.load(p_up + o_n, mask=m_n, other=0.0).to(tl.float32), -limit), limit)
    b_out = b_gate / (1.0 + tl.exp(-b_gate)) * b_up
    tl.store(p_out + o_n, b_out.to(p_out.dtype.element_ty), mask=m_n)


def swiglu(gate_TF: torch.Tensor, up_TF: torch.Tensor, limit: float) -> torch.Tensor:
    """`silu(min(gate, limit)) * clamp(up, -limit, limit)`, in float32, rounded to their dtype."""
    output_TF = torch.empty_like(gate_TF, memory_format=torch.contiguous_format)
    num_elements = output_TF.numel()
    swiglu_kernel[(triton.cdiv(num_elements, SWIGLU_BLOCK),)](
        gate_TF.contiguous(), up_TF.contiguous(), output_TF, limit, num_elements, BLOCK=SWIGLU_BLOCK
    )
    return output_TF
