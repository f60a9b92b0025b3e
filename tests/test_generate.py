"""The public contract of `generate`: its results, their counts, stops and log probabilities."""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, SynthIDTextWatermarkLogitsProcessor

from compressed_spec import GenerationResult, generate, load_model
from compressed_spec.cache import Cache, Verification
from compressed_spec.drafting import DraftRequest
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint
from compressed_spec.stats import RequestStats
from compressed_spec.testing import AlternatingDrafter, OracleDrafter, Reference, greedy_text, random_model, random_text
from compressed_spec.testing.plain import plain_law
from compressed_spec.tree import TokenTree

VOCAB, PROMPT = 48, random_text(6)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(random_model((0, 4, 8)), max_length=64)


@pytest.fixture(scope="module")
def future(reference: Reference) -> list[int]:
    """Greedy text after PROMPT."""
    return greedy_text(reference.model, PROMPT, 32)


# Results


@pytest.mark.parametrize("logprobs", [None, "raw"])
def test_a_result_a_prompt_in_their_order(reference: Reference, logprobs: str | None) -> None:
    prompts = [random_text(n, seed=n) for n in (9, 2, 5)]
    outs = generate(reference.model, prompts, max_new_tokens=7, stop_token_ids=[], batch_size=2, logprobs=logprobs)
    assert [out.token_ids for out in outs] == [greedy_text(reference.model, prompt, 7) for prompt in prompts]
    for prompt, out in zip(prompts, outs, strict=True):
        assert (out.usage.prompt_tokens, out.usage.completion_tokens) == (len(prompt), 7)
        assert out.usage.total_tokens == len(prompt) + 7
        assert isinstance(out, GenerationResult)
        assert isinstance(out.token_ids, list)
        assert out.finish_reason == "length"
        assert isinstance(out.stats, RequestStats)
        assert out.logprobs is None if logprobs is None else len(out.logprobs or ()) == 7
    assert generate(reference.model, []) == []


def test_prompts_may_be_any_sequence_of_integers(reference: Reference) -> None:
    expected = generate(reference.model, [PROMPT], max_new_tokens=4)[0].token_ids
    prompts: list[Any] = [tuple(PROMPT), torch.tensor(PROMPT), torch.tensor(PROMPT).numpy()]
    for prompt in prompts:
        assert generate(reference.model, [prompt], max_new_tokens=4)[0].token_ids == expected


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 0.05), (torch.float16, 0.005), (torch.float32, 1e-5)]
)
def test_every_dtype_decodes(dtype: torch.dtype, tolerance: float) -> None:
    """With more entries than the indexer keeps. The same weights in float64 give nearly the same logits."""
    prompt = random_text(40)
    model, wide = random_model((0, 4, 8), dtype=dtype), random_model((0, 4, 8))
    wide.load_state_dict(model.state_dict())
    out = generate(model, [prompt], tree="s3_k2_d6", max_new_tokens=12, stop_token_ids=[], logprobs="raw")[0]
    assert len(out.token_ids) == 12
    assert out.logprobs is not None
    assert max(out.logprobs) < 0
    narrow_V, wide_V = (
        one.prefill(one.new_cache(max_length=64), [prompt + out.token_ids])[0].double() for one in (model, wide)
    )
    assert float((narrow_V - wide_V).abs().max()) < tolerance * float(wide_V.abs().max())


# Stops


def test_stop_tokens_are_the_checkpoints_eos_or_those_given(future: list[int]) -> None:
    first = {token: future.index(token) for token in future}
    early, late = sorted((token for token in first if 3 <= first[token] < 20), key=lambda token: first[token])[:4:3]
    model = random_model((0, 4, 8), eos_token_id=[late, early])

    def ends(stop_token_ids: list[int] | None, tree: str) -> tuple[list[int], str]:
        out = generate(model, [PROMPT], tree=tree, max_new_tokens=32, stop_token_ids=stop_token_ids)[0]
        return out.token_ids, out.finish_reason

    for tree in ("off", "s3_k2_d6"):
        assert ends(None, tree) == (future[: first[early] + 1], "stop")
        assert ends([], tree) == (future, "length")
        assert ends([late], tree) == (future[: first[late] + 1], "stop")
        assert ends([late, early], tree) == ends(None, tree)


@pytest.mark.parametrize("room", [-1, 0, 9])
@pytest.mark.parametrize("index", range(11))
def test_T29_a_stop_token_anywhere_in_an_accepted_path(
    reference: Reference, future: list[int], monkeypatch: pytest.MonkeyPatch, index: int, room: int
) -> None:
    """Rounds of five tokens; the stop token is token `index`, and max_new_tokens ends `room` tokens later."""
    stop = VOCAB - 1 if future[index] in future[:index] else future[index]
    text = [*future[:index], stop, *future[index + 1 :]]
    expected = text[: max(1, min(index, index + room) + 1)]
    reason = "stop" if expected[-1] == stop else "length"
    committed: list[int] = []
    original = Cache.commit

    def commit(self: Cache, verify: Verification, paths: Sequence[Sequence[int]]) -> None:
        original(self, verify, paths)
        committed.append(self.lengths[0])

    def force(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Where the greedy text repeats itself, a token of its own marks the place."""
        forced = torch.full_like(scores, -math.inf)
        forced[0, text[min(ids.shape[1] - len(PROMPT), len(text) - 1)]] = 0.0
        return forced

    monkeypatch.setattr(Cache, "commit", commit)
    drafter = OracleDrafter([PROMPT + text], VOCAB)
    out = generate(
        reference.model,
        [PROMPT],
        tree="s4_k1_d5",
        drafter=drafter,
        max_new_tokens=max(1, index + room + 1),
        stop_token_ids=[stop],
        logits_processor=force,
        logprobs="raw",
    )[0]
    assert (out.token_ids, out.finish_reason) == (expected, reason)
    assert len(out.logprobs or ()) == len(expected)
    assert committed[-1] == len(PROMPT) + len(expected) - 1
    assert out.stats.num_rounds == -(-(len(expected) - 1) // 5)
    assert drafter.num_rounds <= out.stats.num_rounds
    assert out.stats.num_accepted_tokens <= len(expected) - 1


# Counts


def test_counts_of_rounds_that_are_right_and_wrong_by_turns(reference: Reference, future: list[int]) -> None:
    """Chains of three: 4 tokens, 1, 4, 1, ... after the prefill's one; then a round that max_new_tokens cuts short."""
    drafter = AlternatingDrafter([PROMPT + future], VOCAB)
    out = generate(
        reference.model,
        [PROMPT],
        tree="s3_k1_d4",
        drafter=drafter,
        max_new_tokens=1 + 4 + 1 + 4 + 1 + 2,
        stop_token_ids=[],
    )[0]
    stats = out.stats
    assert out.token_ids == future[:13]
    assert (stats.num_rounds, stats.num_draft_errors) == (5, 0)
    assert stats.num_draft_tokens == 3 + 3 + 3 + 2 + 1  # nothing is drafted that could only be cut off
    assert stats.num_accepted_tokens == 3 + 3 + 1
    assert stats.num_accepted_tokens_per_pos == (3, 2, 2)
    assert stats.acceptance_length == (4 + 1 + 4 + 1) / 4


def test_counts_without_speculation(reference: Reference) -> None:
    stats = generate(reference.model, [PROMPT], tree="off", max_new_tokens=6, stop_token_ids=[])[0].stats
    assert (stats.num_rounds, stats.num_draft_tokens, stats.num_accepted_tokens) == (5, 0, 0)
    assert (stats.num_accepted_tokens_per_pos, stats.acceptance_length) == ((), 1.0)


def test_counts_of_a_text_that_the_prefill_ends(reference: Reference) -> None:
    stats = generate(reference.model, [PROMPT], max_new_tokens=1, stop_token_ids=[])[0].stats
    assert (stats.num_rounds, stats.acceptance_length) == (0, 0.0)


def test_counts_are_each_requests_own(reference: Reference) -> None:
    prompts = [random_text(n, seed=n) for n in (9, 2, 5)]
    options: dict[str, Any] = {"tree": "s3_k2_d6", "max_new_tokens": 12, "stop_token_ids": []}
    together = generate(reference.model, prompts, batch_size=2, **options)
    for prompt, out in zip(prompts, together, strict=True):
        alone = generate(reference.model, [prompt], **options)[0].stats
        for name in ("num_rounds", "num_draft_tokens", "num_accepted_tokens_per_pos", "acceptance_length"):
            assert getattr(out.stats, name) == getattr(alone, name)


def test_times_sum_to_the_wall_time(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes one second a look."""
    looks = itertools.count()
    monkeypatch.setattr("compressed_spec.stats.time.perf_counter", lambda: float(next(looks)))
    first, second = generate(reference.model, [PROMPT, PROMPT[:2]], max_new_tokens=5, stop_token_ids=[], batch_size=2)
    times = first.stats.times
    stages = [times.prefill, times.draft, times.verify, times.sample, times.commit, times.other]
    assert min(stages) > 0
    assert sum(stages) == times.total == next(looks) - 1
    assert times.prefill == 1
    assert times.verify == times.commit == times.draft
    assert second.stats.times == times


# Log probabilities


@pytest.mark.parametrize("tree", ["off", "s3_k1_d4", "s3_k2_d6"])
@pytest.mark.parametrize(
    "law",
    [{"temperature": 0.0}, {"temperature": 0.7}, {"temperature": 1.5, "top_p": 0.8}, {"temperature": 1.0, "top_k": 4}],
    ids=str,
)
def test_T31_every_token_has_its_log_probability(reference: Reference, tree: str, law: dict[str, Any]) -> None:
    """Against log-softmax of one token at a time: the prefill's token, accepted ones, bonus and correction."""
    prompts = [PROMPT, random_text(11, seed=1)]
    options: dict[str, Any] = {"tree": tree, "max_new_tokens": 14, "stop_token_ids": [], "seed": 2}
    raw = generate(reference.model, prompts, logprobs="raw", **options, **law)
    filtered = generate(reference.model, prompts, logprobs="filtered", **options, **law)
    assert tree == "off" or sum(out.stats.num_accepted_tokens for out in raw) > 0
    for prompt, one, other in zip(prompts, raw, filtered, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert len(one.logprobs) == len(other.logprobs) == 14
        for n, token in enumerate(one.token_ids):
            logits_V = reference.after(prompt + one.token_ids[:n]).logits_V
            assert one.logprobs[n] == pytest.approx(float(torch.log_softmax(logits_V, -1)[token]), abs=1e-9)
            assert other.logprobs[n] == pytest.approx(float(plain_law(logits_V, **law)[token].log()), abs=1e-9)


def test_T31_filtered_log_probabilities_follow_the_processors(reference: Reference) -> None:
    bias = {3: 4.0, 5: -math.inf}
    for kind in ("raw", "filtered"):
        out = generate(
            reference.model,
            [PROMPT],
            temperature=0.9,
            logit_bias=bias,
            max_new_tokens=10,
            stop_token_ids=[],
            logprobs=kind,
        )[0]
        assert out.logprobs is not None
        for n, token in enumerate(out.token_ids):
            scores_V = reference.after(PROMPT + out.token_ids[:n]).logits_V.clone()
            if kind == "filtered":
                scores_V[3] += 4.0
                scores_V[5] = -math.inf
            law_V = plain_law(scores_V, temperature=0.9 if kind == "filtered" else 1.0)
            assert out.logprobs[n] == pytest.approx(float(law_V[token].log()), abs=1e-9)


# Refusals that are made before anything runs


class Object:
    """A drafter of a user's own, which has no law."""

    def start(self, row: int, token_ids: Sequence[int]) -> None: ...

    def observe(self, row: int, token_ids: Sequence[int]) -> None: ...

    def release(self, row: int) -> None: ...

    def propose(self, request: DraftRequest) -> list[TokenTree]:
        raise AssertionError("refused combinations do not run")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("verifier", "tree", "drafter", "reason"),
    [
        ("leviathan", "s3_k2_d6", "mtp", "takes chains only and this tree branches: use 'traversal', or k1"),
        ("block", "s2_k3_d5", "mtp", "takes chains only and this tree branches: use 'traversal', or k1"),
        ("leviathan", "s3_k1_d4", "ngram", "NgramDrafter cannot draw from a law"),
        ("block", "s3_k1_d4", "ngram", "use 'coupled' or 'target'"),
        ("traversal", "s3_k2_d6", "ngram", "compares drafts with the law that drew them"),
        ("traversal", "s3_k2_d6", Object(), "Object cannot draw from a law"),
    ],
)
def test_T36_verifiers_that_would_not_be_lossless(
    reference: Reference, verifier: str, tree: str, drafter: Any, reason: str, temperature: float
) -> None:
    with pytest.raises(ValueError, match=reason):
        generate(reference.model, [PROMPT], verifier=verifier, tree=tree, drafter=drafter, temperature=temperature)


STATEFUL = SynthIDTextWatermarkLogitsProcessor(5, [1, 2, 3], 8, 0, 4, torch.device("cpu"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda decode: decode([3, 4]), "Prompt 0 must be a list of token ids, got '3'"),
        (lambda decode: decode(["hi"]), "Prompt 0 must be a list of token ids, got 'hi': tokenize text first"),
        (lambda decode: decode([[3], [1.5]]), "Prompt 1 must be a list of token ids"),
        (
            lambda decode: decode(["hi"], stopping_criteria=lambda ids, scores: False),
            "Prompt 0 must be a list of token",
        ),
        (lambda decode: decode([[]]), "A prompt is empty: give at least one token id"),
        (lambda decode: decode([[48]]), "Token id 48 is out of range: the vocabulary has ids 0 .. 47"),
        (lambda decode: decode([[-1]]), "Token id -1 is out of range"),
        (lambda decode: decode([[3]], stop_token_ids=5), "stop_token_ids must be a list of token ids"),
        (lambda decode: decode([[3]], seed=1.5), "seed must be an int, or a list of one int a prompt"),
        (lambda decode: decode([[3]], seed=["x"]), "seed must be an int"),
        (lambda decode: decode([[3]], max_new_tokens=2.5), "max_new_tokens must be an int of at least 1"),
        (lambda decode: decode([[3]], logprobs="all"), "Unknown logprobs 'all': use 'raw', 'filtered' or None"),
        (lambda decode: decode([[3]], logit_bias={48: 1.0}), "names token 48, but the vocabulary ends at 47"),
        (lambda decode: decode([[3]], logits_processor=LogitsProcessorList([STATEFUL])), "SynthIDTextWatermark"),
        (lambda decode: decode([[3]], logits_processor=STATEFUL), "needs more than one row's ids and scores"),
        (lambda decode: decode([[3] * 4090], max_new_tokens=8), "shorten the prompt or lower max_new_tokens"),
    ],
)
def test_T36_what_is_no_request(reference: Reference, call: Callable[[Any], object], message: str) -> None:
    with pytest.raises(ValueError) as error:
        call(functools.partial(generate, reference.model))
    assert message in str(error.value)


def test_T36_what_cannot_be_loaded(tmp_path: Any) -> None:
    folder = make_tiny_checkpoint(tmp_path, compress_ratios=(0,))
    for options, message in (
        ({"device": "warp"}, "Device 'warp' cannot be used"),
        ({"device": torch.device("cuda", 99)}, "Device 'cuda:99' cannot be used"),
        ({"dtype": "float8"}, "Unknown dtype 'float8': use one of float32"),
        ({"numerics": "exact"}, "'exact'"),
    ):
        with pytest.raises(ValueError, match=message):
            load_model(folder, progress=False, **options)
