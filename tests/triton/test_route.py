"""The router in one kernel, and the gated activation."""

import pytest
import torch

from compressed_spec.kernels import moe, route_triton
from compressed_spec.kernels.numerics import numerics_named
from compressed_spec.testing.exactness import assert_as_exact_as

FAST = numerics_named("fast")


def scores(logits_TE: torch.Tensor) -> torch.Tensor:
    return moe.router_scores(logits_TE, torch.eye(logits_TE.shape[1], dtype=logits_TE.dtype), FAST)


@pytest.mark.parametrize(("experts", "chosen"), [(5, 2), (256, 6), (384, 6), (1, 1)])
def test_routing_by_score(experts: int, chosen: int) -> None:
    logits_TE, bias_E = 4 * torch.randn(9, experts), 0.3 * torch.randn(experts)
    logits_TE[0] -= 60  # scores that only a careful logarithm gets right
    logits_TE[1] += 60
    routing = route_triton.route(logits_TE, bias_E, None, torch.zeros(9), num_chosen=chosen, scaling=1.5)
    exact_TE = scores(logits_TE.double())
    assert torch.equal(routing.experts_TK, (exact_TE.float() + bias_E).topk(chosen, dim=-1).indices)
    exact = moe.route(exact_TE, routing.experts_TK, 1.5).weights_TK
    assert_as_exact_as(routing.weights_TK, moe.route(scores(logits_TE), routing.experts_TK, 1.5).weights_TK, exact)


def test_routing_by_table() -> None:
    table_VK = torch.rand(20, 8).argsort(dim=1)[:, :3].contiguous()
    tokens_T, logits_TE = torch.tensor([19, 0, 7]), torch.randn(3, 8)
    routing = route_triton.route(logits_TE, None, table_VK, tokens_T, num_chosen=3, scaling=2.5)
    assert torch.equal(routing.experts_TK, table_VK[tokens_T])
    exact = moe.route(scores(logits_TE.double()), routing.experts_TK, 2.5).weights_TK
    assert_as_exact_as(routing.weights_TK, moe.route(scores(logits_TE), routing.experts_TK, 2.5).weights_TK, exact)


def test_ties_go_to_the_smallest_expert() -> None:
    routing = route_triton.route(torch.zeros(1, 40), torch.zeros(40), None, torch.zeros(1), num_chosen=4, scaling=1.0)
    assert routing.experts_TK.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_swiglu(dtype: torch.dtype) -> None:
    gate, up = (8 * torch.randn(2, 7, 150)).to(dtype)
    actual = route_triton.swiglu(gate, up, 3.0)
    assert_as_exact_as(actual, moe.swiglu(gate, up, 3.0, FAST), moe.swiglu(gate.double(), up.double(), 3.0, FAST))
