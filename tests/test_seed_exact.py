"""Seed-exact: with coupled noise a request's text is that of plain sampling with its seed, whatever drafts and whoever
else decodes; and with processors the same, since every tree node is processed with its own path's history.
"""

import math
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor, TemperatureLogitsWarper

from compressed_spec import generate
from compressed_spec.decode import Request
from compressed_spec.drafting import Drafter
from compressed_spec.generate import collect, make_decoder, make_requests
from compressed_spec.noise import request_seed
from compressed_spec.sampling_params import SamplingParams
from compressed_spec.testing import RandomDrafter, Reference, random_model, random_text
from compressed_spec.testing.plain import Process, plain_text

VOCAB, COUNT = 48, 16
CHAINS = ["s1_k1_d2", "s2_k1_d3", "s4_k1_d5", "s15_k1_d16"]
TREES = ["s1_k2_d3", "s3_k2_d6", "s4_k2_d15", "s2_k3_d5", "s3_k3_d16"]

pytestmark = pytest.mark.filterwarnings("ignore:None of .* tokens drafted by RandomDrafter")


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(random_model((0, 4, 8)), max_length=48)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A request and the options of its law."""

    prompt: list[int]
    seed: int
    options: dict[str, Any]

    @property
    def request(self) -> Request:
        return Request(
            prompt_ids=tuple(self.prompt),
            params=SamplingParams(seed=self.seed, **self.options),
            max_new_tokens=COUNT,
            stop_token_ids=frozenset(),
        )


# Temperature and filters, as both sides name them; prompts of every length around the first windows.
CASES = [
    Case(prompt=random_text(length, seed=length), seed=seed, options=options)
    for length, seed, options in [
        (1, 0, {"temperature": 0.3}),
        (3, 1, {"temperature": 0.7}),
        (4, 2, {"temperature": 1.0}),
        (7, -5, {"temperature": 0.7, "top_p": 0.9}),
        (8, 2**63, {"temperature": 1.0, "top_p": 0.9, "top_k": 20}),
        (9, 5, {"temperature": 1.0, "min_p": 0.05}),
        (15, 6, {"temperature": 0.0}),
        (16, 7, {"temperature": 2.0, "top_k": 5}),
    ]
]


@pytest.fixture(scope="module")
def texts(reference: Reference) -> list[list[int]]:
    """What plain sampling makes of CASES."""
    return [plain_text(reference, case.prompt, COUNT, seed=case.seed, **case.options) for case in CASES]


def decoded(reference: Reference, cases: list[Case], tree: str, drafter: str | Drafter, batch_size: int) -> Any:
    requests = [case.request for case in cases]
    decoder = make_decoder(
        reference.model, requests, tree=tree, drafter=drafter, verifier="coupled", batch_size=batch_size
    )
    return collect(decoder, len(requests))


def make(drafter: str) -> str | Drafter:
    return RandomDrafter(VOCAB, seed=3) if drafter == "random" else drafter


@pytest.mark.parametrize(
    ("tree", "drafter"),
    [(tree, "mtp") for tree in CHAINS + TREES]
    + [(tree, drafter) for tree in ("s4_k1_d5", "s3_k2_d6", "s3_k3_d16") for drafter in ("ngram", "random")],
)
def test_any_tree_and_drafter(reference: Reference, texts: list[list[int]], tree: str, drafter: str) -> None:
    """Eight requests of different temperatures and filters in five rows."""
    outs = decoded(reference, CASES, tree, make(drafter), 5)
    assert [out.token_ids for out in outs] == texts
    if drafter == "mtp":
        assert sum(out.stats.num_accepted_tokens for out in outs) > 10


@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize("tree", ["off", "s3_k2_d6"])
def test_any_batch_size(reference: Reference, texts: list[list[int]], tree: str, batch_size: int) -> None:
    assert [out.token_ids for out in decoded(reference, CASES, tree, "auto", batch_size)] == texts


@pytest.mark.parametrize("shuffle", range(2))
def test_any_company(reference: Reference, texts: list[list[int]], shuffle: int) -> None:
    """Each request's text, wherever it stands and whoever stands beside it, copies of itself included."""
    order = random.Random(shuffle).choices(range(len(CASES)), k=7)
    outs = decoded(reference, [CASES[i] for i in order], "s3_k2_d6", "mtp", 4)
    assert [out.token_ids for out in outs] == [texts[i] for i in order]


def test_T28_seeds(reference: Reference) -> None:
    prompts = [random_text(6, seed=1)] * 3

    def text(**options: Any) -> list[list[int]]:
        outs = generate(reference.model, prompts, temperature=1.0, max_new_tokens=COUNT, stop_token_ids=[], **options)
        return [out.token_ids for out in outs]

    by_int = text(seed=5)
    assert by_int == text(seed=5) == text(seed=5, tree="off", batch_size=1)
    assert by_int == text(seed=[request_seed(5, i) for i in range(3)], tree="s5_k1_d6")
    assert by_int == text(seed=5 + 2**64)
    assert len({*map(tuple, by_int), *map(tuple, text(seed=6))}) == 6
    assert text(seed=[9, 9, 4]) == text(seed=[4, 9, 9])[1:] + text(seed=[4, 9, 9])[:1]
    assert text(seed=[9, 9, 4])[0] == text(seed=[9, 9, 4])[1]


@pytest.mark.parametrize("verifier", ["coupled", "target", "leviathan", "block", "traversal"])
def test_T28_every_verifier_depends_on_the_requests_own_seed_alone(reference: Reference, verifier: str) -> None:
    """Texts of named verifiers are not plain sampling's, but they are functions of prompt, options and seed."""
    prompts, seeds = [random_text(n, seed=n) for n in (3, 9, 5, 3)], [1, 2, 3, 4]
    options: dict[str, Any] = {
        "temperature": 0.9,
        "top_p": 0.95,
        "verifier": verifier,
        "tree": "s3_k1_d4" if verifier in ("leviathan", "block") else "s3_k2_d6",
        "drafter": "mtp",
        "max_new_tokens": COUNT,
        "stop_token_ids": [],
    }
    together = [out.token_ids for out in generate(reference.model, prompts, seed=seeds, **options)]
    alone = [
        generate(reference.model, [prompt], seed=[seed], **options)[0].token_ids
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    backwards = [out.token_ids for out in generate(reference.model, prompts[::-1], seed=seeds[::-1], **options)]
    assert together == alone == backwards[::-1]
    assert together[0] != together[3]


# T32. Each processor as an option of `generate`, and written a second time.


def repetition(prompt: list[int], new: list[int], scores_V: torch.Tensor) -> torch.Tensor:
    for token in set(prompt + new):
        scores_V[token] = scores_V[token] * 1.6 if scores_V[token] < 0 else scores_V[token] / 1.6
    return scores_V


def counts(prompt: list[int], new: list[int], scores_V: torch.Tensor) -> torch.Tensor:
    for token in set(new):
        scores_V[token] -= 0.7 + 0.4 * new.count(token)
    return scores_V


def bias(prompt: list[int], new: list[int], scores_V: torch.Tensor) -> torch.Tensor:
    scores_V[7] += 2.0
    scores_V[9] = -math.inf
    return scores_V


def no_stop_yet(prompt: list[int], new: list[int], scores_V: torch.Tensor) -> torch.Tensor:
    if len(new) < 9:
        scores_V[STOPS] = -math.inf
    return scores_V


def alternate(prompt: list[int], new: list[int], scores_V: torch.Tensor) -> torch.Tensor:
    """An even token after an odd one, and the other way round; a grammar of two words."""
    scores_V[(prompt + new)[-1] % 2 :: 2] = -math.inf
    return scores_V


def no_repeats(prompt: list[int], new: list[int], scores_V: torch.Tensor) -> torch.Tensor:
    scores_V[prompt + new] = -math.inf
    return scores_V / 0.8


def all_of_them(prompt: list[int], new: list[int], scores_V: torch.Tensor) -> torch.Tensor:
    for process in (repetition, counts, bias, alternate):
        scores_V = process(prompt, new, scores_V)
    return scores_V


def custom(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    assert ids.shape[0] == scores.shape[0] == 1
    text = ids[0].tolist()
    return alternate(text[:-1], text[-1:], scores[0].clone())[None]


STOPS = list(range(0, VOCAB, 3))
BIAS = {7: 2.0, 9: -math.inf}
PROCESSORS: dict[str, tuple[Process, dict[str, Any]]] = {
    "repetition_penalty": (repetition, {"repetition_penalty": 1.6}),
    "presence_and_frequency": (counts, {"presence_penalty": 0.7, "frequency_penalty": 0.4}),
    "logit_bias": (bias, {"logit_bias": BIAS}),
    "min_new_tokens": (no_stop_yet, {"min_new_tokens": 9, "stop_token_ids": STOPS}),
    "custom": (alternate, {"logits_processor": custom}),
    "transformers": (
        no_repeats,
        {"logits_processor": LogitsProcessorList([NoRepeatNGramLogitsProcessor(1), TemperatureLogitsWarper(0.8)])},
    ),
    "all": (
        all_of_them,
        {
            "repetition_penalty": 1.6,
            "presence_penalty": 0.7,
            "frequency_penalty": 0.4,
            "logit_bias": BIAS,
            "logits_processor": custom,
        },
    ),
}


@pytest.mark.parametrize("law", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.9}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", PROCESSORS)
def test_T32_processors_see_each_paths_own_history(reference: Reference, name: str, law: dict[str, Any]) -> None:
    process, options = PROCESSORS[name]
    prompts, seeds = [random_text(n, seed=n) for n in (5, 12)], [3, 4]
    stops = options.get("stop_token_ids", [])
    expected, plain = [], []
    for prompt, seed in zip(prompts, seeds, strict=True):
        text = plain_text(reference, prompt, COUNT, seed=seed, process=process, **law)
        expected.append(text[: next((i + 1 for i, token in enumerate(text) if token in stops), COUNT)])
        plain.append(plain_text(reference, prompt, len(expected[-1]), seed=seed, **law))
    assert expected != plain, "the processor must matter"
    for tree, drafter in (("off", "auto"), ("s3_k2_d6", "mtp"), ("s2_k3_d6", "random")):
        outs = generate(
            reference.model,
            prompts,
            tree=tree,
            drafter=make(drafter),
            seed=seeds,
            max_new_tokens=COUNT,
            **({"stop_token_ids": []} | law | options),
        )
        assert [out.token_ids for out in outs] == expected, (tree, drafter)


def test_T27_a_greedy_row_beside_a_hot_one(reference: Reference) -> None:
    """Temperatures 0, next to 0, 1 and very high in one batch, with tokens excluded: every row as if it were alone."""
    prompt, biased = random_text(6, seed=2), {"logit_bias": dict.fromkeys(range(0, VOCAB, 2), -math.inf)}
    params: list[dict[str, Any]] = [{"temperature": t} for t in (0.0, 1e-9, 1.0, 1e6)]
    requests: list[Request] = []
    for options in (*params, *({**one, **biased} for one in params)):
        requests += make_requests(
            reference.model, [prompt], SamplingParams(**options), max_new_tokens=COUNT, seed=[11], stop_token_ids=[]
        )

    def texts(requests: list[Request]) -> list[list[int]]:
        decoder = make_decoder(
            reference.model, requests, tree="s3_k2_d6", drafter="mtp", verifier="auto", batch_size=len(requests)
        )
        return [out.token_ids for out in collect(decoder, len(requests))]

    together = texts(requests)
    assert together == [texts([request])[0] for request in requests]

    def odd(prompt: list[int], new: list[int], scores_V: torch.Tensor) -> torch.Tensor:
        return scores_V.index_fill(0, torch.arange(0, VOCAB, 2), -math.inf)

    assert together[0] == together[1] == plain_text(reference, prompt, COUNT)
    assert together[4] == together[5] == plain_text(reference, prompt, COUNT, process=odd)
    assert together[2] == plain_text(reference, prompt, COUNT, seed=11, temperature=1.0)
    assert len({tuple(text) for text in together}) == 6
    assert all(token % 2 for text in together[4:] for token in text)
