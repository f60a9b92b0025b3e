"""`score`: the same model as prefill and verify, with gradients for every parameter of the body.

T = tokens, V = vocabulary, M = residual streams, D = model width
"""

import pytest
import torch
import torch.nn.functional as F

from compressed_spec import TokenTree, load_model
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint

VOCAB = 300
# Two sequences, so that rows of a flat batch could be mixed up; the first closes HCA windows and drops CSA entries.
SEQUENCES = [[(7 * i * i + 3) % VOCAB for i in range(37)], [(11 * i + 5) % VOCAB for i in range(14)]]


def has_gradient(name: str) -> bool:
    """The indexer and the routers' bias only choose, and the draft head is no part of the target's logits."""
    return not (name.startswith("mtp.") or ".indexer." in name or name.endswith("gate.bias"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DeepseekV4:
    folder = make_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"),
        experts="bf16",
        compress_ratios=(0, 4, 8),
        vocab_size=VOCAB,
        hidden_size=64,
        num_attention_heads=2,
        head_dim=32,
        index_topk=4,
        sliding_window=6,
        swiglu_limit=0.8,
    )
    return load_model(folder, dtype="float64", progress=False).requires_grad_(True)


def loss_of(model: DeepseekV4) -> torch.Tensor:
    """Mean cross entropy of each next token."""
    streams_TMD, plan = model.score(SEQUENCES)
    logits_TV = model.logits(streams_TMD)
    inside_T = torch.ones(len(logits_TV), dtype=torch.bool)
    inside_T[torch.tensor([len(sequence) for sequence in SEQUENCES]).cumsum(0) - 1] = False
    return F.cross_entropy(logits_TV[inside_T], plan.tokens_T.roll(-1)[inside_T])


def test_score_equals_prefill_and_verify(model: DeepseekV4) -> None:
    streams_TMD, plan = model.score(SEQUENCES)
    logits_TV = model.logits(streams_TMD)
    assert plan.tokens_T.tolist() == [token for sequence in SEQUENCES for token in sequence]
    cache = model.new_cache(batch_size=2, max_length=40)
    verify = model.verify(cache, [TokenTree.chain(sequence) for sequence in SEQUENCES])
    torch.testing.assert_close(verify.logits, logits_TV, rtol=1e-12, atol=1e-12)

    ends = torch.tensor([len(SEQUENCES[0]), len(plan.tokens_T)]) - 1
    prefilled = model.new_cache(batch_size=2, max_length=40, prefill_chunk=9)
    logits_BV = model.prefill(prefilled, SEQUENCES)
    torch.testing.assert_close(logits_BV, logits_TV[ends], rtol=1e-10, atol=1e-10)
    pending_BMD = prefilled.pools["pending_stream"][0, :2].unflatten(-1, streams_TMD.shape[1:])
    torch.testing.assert_close(pending_BMD, streams_TMD[ends], rtol=1e-10, atol=1e-10)


def test_gradients_reach_every_parameter_of_the_body(model: DeepseekV4) -> None:
    model.zero_grad()
    loss_of(model).backward()
    for name, parameter in model.named_parameters():
        if not has_gradient(name):
            assert parameter.grad is None, f"{name} cannot change the loss"
            continue
        assert parameter.grad is not None, f"no gradient for {name}"
        assert torch.isfinite(parameter.grad).all(), f"gradient of {name} is not finite"
        assert parameter.grad.abs().max() > 0, f"gradient of {name} is zero"


def test_position_bias_has_a_gradient_in_every_slot(model: DeepseekV4) -> None:
    model.zero_grad()
    loss_of(model).backward()
    slots = {
        name: p.grad.abs().amax(-1)
        for name, p in model.named_parameters()
        if name.endswith("attn.compressor.ape") and p.grad is not None
    }
    assert {name: len(slot_S) for name, slot_S in slots.items()} == {
        "layers.1.attn.compressor.ape": 4,
        "layers.2.attn.compressor.ape": 8,
    }
    assert all((slot_S > 0).all() for slot_S in slots.values())


def test_gradients_equal_finite_differences(model: DeepseekV4) -> None:
    """Every parameter is moved along a random direction, in float64."""
    model.zero_grad()
    loss_of(model).backward()
    step = 1e-6
    for name, parameter in model.named_parameters():
        if not has_gradient(name):
            continue
        assert parameter.grad is not None
        direction = torch.randn_like(parameter)
        direction /= direction.norm()
        with torch.no_grad():
            start = parameter.clone()
            parameter.copy_(start + step * direction)
            above = loss_of(model)
            parameter.copy_(start - step * direction)
            below = loss_of(model)
            parameter.copy_(start)
        slope = ((above - below) / (2 * step)).item()
        expected = (parameter.grad * direction).sum().item()
        assert slope == pytest.approx(expected, rel=1e-4, abs=1e-8), name
