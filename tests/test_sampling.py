"""The target law: options, processors and filters against transformers, temperatures, seeds, and the joint law.

Shape suffixes: N nodes, V vocabulary.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from compressed_spec.noise import seed_tensor
from compressed_spec.processors import NodeHistory, process_logits
from compressed_spec.sampling import greedy_tokens, select_tokens, target_log_probs, target_tokens
from compressed_spec.sampling_params import SamplingParams

INF = math.inf


def hf_log_probs(logits_V: Tensor, params: SamplingParams, history: NodeHistory) -> Tensor:
    """transformers' processors, in its order, in float64."""
    processors = LogitsProcessorList()
    if params.repetition_penalty != 1:
        processors.append(RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    if params.min_new_tokens:
        skip, eos = len(history.prompt_ids), list(history.eos_token_ids)
        processors.append(MinNewTokensLengthLogitsProcessor(skip, params.min_new_tokens, eos))
    processors.append(TemperatureLogitsWarper(float(params.temperature)))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    ids = torch.tensor([[*history.prompt_ids, *history.generated_ids]])
    scores: Tensor = processors(ids, logits_V[None].double())
    return scores[0].log_softmax(-1)


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 1000},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.0, "top_p": 0.05},
    {"temperature": 2.0, "min_p": 0.1},
    {"temperature": 1.0, "min_p": 1.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 0.9, "repetition_penalty": 1.7, "top_k": 12},
    {"temperature": 1.1, "repetition_penalty": 0.6, "min_new_tokens": 4, "top_p": 0.7},
]


def test_T25_law_is_that_of_transformers_for_mixed_rows_in_one_call() -> None:
    logits_NV = torch.randn(len(OPTIONS), 50, dtype=torch.float64) * 3
    params = [SamplingParams(**options) for options in OPTIONS]
    histories = [
        NodeHistory(prompt_ids=[1, 4, 4], generated_ids=list(range(n % 6)), eos_token_ids=[2, 7])
        for n in range(len(OPTIONS))
    ]
    log_p_NV = target_log_probs(logits_NV, params, histories)
    for n, options in enumerate(OPTIONS):
        expected_V = hf_log_probs(logits_NV[n], params[n], histories[n])
        assert torch.equal(log_p_NV[n].isinf(), expected_V.isinf()), options
        torch.testing.assert_close(log_p_NV[n].exp(), expected_V.exp(), rtol=1e-12, atol=1e-15)
        alone_1V = target_log_probs(logits_NV[n : n + 1], params[n : n + 1], histories[n : n + 1])
        assert torch.equal(alone_1V[0], log_p_NV[n]), "a row depends on its company"


def test_filters_on_ties() -> None:
    """top-k keeps all that tie with the k-th, as transformers does; top-p keeps the smaller ids of equal tokens."""
    logits_1V = torch.tensor([[1.0, 2.0, 1.0, 1.0, 0.0]])
    kept = target_log_probs(logits_1V, [SamplingParams(temperature=1.0, top_k=2)])[0].isfinite()
    assert kept.tolist() == [True, True, True, True, False]
    kept = target_log_probs(torch.zeros(1, 4), [SamplingParams(temperature=1.0, top_p=0.5)])[0].isfinite()
    assert kept.tolist() == [True, True, False, False]
    kept = target_log_probs(torch.zeros(1, 1000), [SamplingParams(temperature=1.0, top_p=0.3)])[0].isfinite()
    assert kept.nonzero().flatten().tolist() == list(range(int(kept.sum())))
    assert 299 <= int(kept.sum()) <= 301


def test_top_p_too_small_for_float64_keeps_the_best_token() -> None:
    log_p_NV = target_log_probs(torch.tensor([[0.0, 1.0, 0.5]]), [SamplingParams(temperature=1.0, top_p=1e-20)])
    assert log_p_NV.tolist() == [[-INF, 0.0, -INF]]


def test_T32_presence_and_frequency_penalties_count_generated_tokens_only() -> None:
    history = NodeHistory(prompt_ids=[0, 0, 1], generated_ids=[2, 3, 3])
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    scores_1V = process_logits(torch.ones(1, 5), [params], [history])
    assert scores_1V.tolist() == [[1.0, 1.0, 0.25, 0.0, 1.0]]


def test_T32_bias_mask_and_minimum_length() -> None:
    def scores(params: SamplingParams, generated: list[int]) -> list[float]:
        history = NodeHistory(prompt_ids=[9], generated_ids=generated, eos_token_ids=[0, 3])
        row: list[float] = process_logits(torch.arange(4.0)[None], [params], [history])[0].tolist()
        return row

    assert scores(SamplingParams(logit_bias={1: 2.5, 3: -INF}), []) == [0.0, 3.5, 2.0, -INF]
    assert scores(SamplingParams(allowed_token_ids=(2, 0)), []) == [0.0, -INF, 2.0, -INF]
    assert scores(SamplingParams(min_new_tokens=2), [1]) == [-INF, 1.0, 2.0, -INF]
    assert scores(SamplingParams(min_new_tokens=2), [1, 1]) == [0.0, 1.0, 2.0, 3.0]
    with pytest.raises(ValueError, match="vocabulary ends at 3"):
        scores(SamplingParams(logit_bias={4: 1.0}), [])
    with pytest.raises(ValueError, match="vocabulary ends at 3"):
        scores(SamplingParams(allowed_token_ids=(4,)), [])


def test_T32_processors_see_each_nodes_own_path() -> None:
    """Siblings differ by their last token, and by it alone; the logits given are left as they were."""
    seen: list[list[int]] = []

    def forbid_last(ids_1L: Tensor, scores_1V: Tensor) -> Tensor:
        seen.append(ids_1L[0].tolist())
        scores_1V[0, ids_1L[0, -1]] = -INF
        return scores_1V

    logits_NV = torch.zeros(3, 4)
    params = [SamplingParams(temperature=1.0, logits_processor=forbid_last)] * 2 + [SamplingParams(temperature=1.0)]
    histories = [NodeHistory(prompt_ids=[0], generated_ids=path) for path in ([1, 2], [1, 3], [1, 1])]
    log_p_NV = target_log_probs(logits_NV, params, histories)
    assert seen == [[0, 1, 2], [0, 1, 3]]
    assert log_p_NV.isinf().nonzero().tolist() == [[0, 2], [1, 3]]
    assert torch.equal(logits_NV, torch.zeros(3, 4))

    bad = SamplingParams(logits_processor=lambda ids, scores: scores[:, :2])
    with pytest.raises(ValueError, match="must return scores of shape"):
        process_logits(torch.zeros(1, 4), [bad], histories[:1])


def test_T32_custom_processor_may_be_a_transformers_list() -> None:
    logits_NV = torch.randn(1, 20, dtype=torch.float64)
    history = NodeHistory(prompt_ids=[3, 4], generated_ids=[5])
    custom = SamplingParams(
        temperature=1.0, logits_processor=LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.3)])
    )
    own = SamplingParams(temperature=1.0, repetition_penalty=1.3)
    assert torch.equal(target_log_probs(logits_NV, [custom], [history]), target_log_probs(logits_NV, [own], [history]))


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", INF),
        ("temperature", None),
        ("temperature", "1"),
        ("top_p", None),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -1),
        ("top_k", 2.0),
        ("top_k", True),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("min_p", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("presence_penalty", math.nan),
        ("frequency_penalty", INF),
        ("min_new_tokens", -1),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: None}),
        ("logit_bias", {-1: 1.0}),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (-1,)),
        ("logits_processor", []),
        ("seed", 1.5),
    ],
)
def test_bad_options_are_refused_by_name(option: str, value: Any) -> None:
    with pytest.raises(ValueError, match=option):
        SamplingParams(**{option: value})


def test_T27_temperature_zero_beside_others() -> None:
    """A greedy row is argmax (the smallest id on a tie) whatever its neighbours are; -inf logits stay safe."""
    logits_NV = torch.tensor([[1.0, 3.0, 3.0, -INF], [0.0, -INF, 0.0, -INF], [2.0, 1.0, -INF, 2.0]])
    params = [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(top_k=1, top_p=0.1, seed=4)]
    log_p_NV = target_log_probs(logits_NV, params)
    assert log_p_NV[0].tolist() == [-INF, 0.0, -INF, -INF]
    assert log_p_NV[1].exp().tolist() == pytest.approx([0.5, 0.0, 0.5, 0.0])
    assert log_p_NV[2].tolist() == [0.0, -INF, -INF, -INF]
    for position in range(20):
        tokens = target_tokens(logits_NV, params, torch.full((3,), position)).tolist()
        assert tokens[0] == 1
        assert tokens[1] in (0, 2)
        assert tokens[2] == 0
    assert greedy_tokens(logits_NV).tolist() == [1, 0, 0]


@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e-8])
def test_T27_tiny_temperatures_are_greedy_and_finite(temperature: float) -> None:
    logits_NV = torch.tensor([[5.0, 1e4, -INF, -1e4], [3e38, -3e38, 0.0, 1.0]])
    log_p_NV = target_log_probs(logits_NV, [SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1, top_k=3)] * 2)
    assert not log_p_NV.isnan().any()
    assert log_p_NV.exp().tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("row", "message"),
    [([0.0, math.nan], "a score of nan"), ([0.0, INF], "a score of inf"), ([-INF, -INF], "no token")],
)
def test_T27_bad_logits_are_refused(row: list[float], message: str, temperature: float) -> None:
    logits_NV = torch.tensor([[0.0, 1.0], row])
    params = [SamplingParams(temperature=temperature)] * 2
    with pytest.raises(ValueError, match=f"Row 1 of the logits has {message}"):
        target_log_probs(logits_NV, params)
    with pytest.raises(ValueError, match=f"Row 1 of the logits has {message}"):
        target_tokens(logits_NV, params, torch.tensor([0, 0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_law_is_float64_whatever_the_logits_are(dtype: torch.dtype) -> None:
    logits_NV = torch.randn(2, 30).to(dtype)
    log_p_NV = target_log_probs(logits_NV, [SamplingParams(temperature=0.7)] * 2)
    assert log_p_NV.dtype == torch.float64
    torch.testing.assert_close(log_p_NV, (logits_NV.double() / 0.7).log_softmax(-1), rtol=1e-13, atol=1e-13)


def test_T28_seed_decides_and_company_does_not() -> None:
    logits_NV = torch.randn(40, 100)
    positions = torch.arange(40)

    def tokens(seed: int) -> list[int]:
        params = [SamplingParams(temperature=1.0, top_p=0.95, seed=seed)] * 40
        row: list[int] = target_tokens(logits_NV, params, positions).tolist()
        return row

    assert tokens(3) == tokens(3)
    assert sum(a != b for a, b in zip(tokens(3), tokens(4), strict=True)) > 20
    mixed = [SamplingParams(temperature=1.0, top_p=0.95, seed=3), SamplingParams(), SamplingParams(temperature=2.0)]
    for n in range(40):
        rows = logits_NV[[n, (n + 1) % 40, (n + 2) % 40]]
        assert int(target_tokens(rows, mixed, torch.tensor([n, 5, 6]))[0]) == tokens(3)[n]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.5},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 4},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.5, "top_k": 6, "top_p": 0.9, "min_p": 0.05},
    ],
    ids=str,
)
def test_T25_joint_law_of_three_coupled_tokens(options: dict[str, Any]) -> None:
    """Chi-square over all texts of three tokens from a vocabulary of 8, whose logits depend on the token before."""
    count, vocab_size = 60_000, 8
    logits_VV = torch.randn(vocab_size, vocab_size, dtype=torch.float64)
    log_p_VV = target_log_probs(logits_VV, [SamplingParams(**options)] * vocab_size)
    p_VV = log_p_VV.exp()
    seeds, last = torch.arange(count), torch.zeros(count, dtype=torch.int64)
    text = torch.zeros_like(last)
    for position in range(5, 8):
        last = select_tokens(log_p_VV[last], seeds, torch.full((count,), position))
        text = text * vocab_size + last
    expected = (p_VV[0][:, None, None] * p_VV[:, :, None] * p_VV[None, :, :]).flatten() * count
    counts = torch.bincount(text, minlength=vocab_size**3).double()
    assert counts[expected == 0].sum() == 0
    likely = expected >= 5
    observed = torch.cat([counts[likely], counts[~likely].sum()[None]])
    wanted = torch.cat([expected[likely], expected[~likely].sum()[None].clamp(min=1e-9)])
    degrees = len(wanted) - 1
    assert float(((observed - wanted) ** 2 / wanted).sum()) < degrees + 4 * math.sqrt(2 * degrees)


def test_select_tokens_equals_target_tokens() -> None:
    logits_NV = torch.randn(6, 32)
    params = [SamplingParams(temperature=0.8, seed=seed) for seed in (0, -1, 2**64 + 5, 7, 7, 7)]
    positions = torch.tensor([0, 1, 2, 3, 4, 10**6])
    selected = select_tokens(target_log_probs(logits_NV, params), seed_tensor([p.seed for p in params]), positions)
    assert torch.equal(selected, target_tokens(logits_NV, params, positions))
