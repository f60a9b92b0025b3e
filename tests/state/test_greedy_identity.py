"""Speculative greedy decoding gives plain greedy decoding's tokens, whoever drafts and in whatever shape."""

import pytest

from compressed_spec import generate
from compressed_spec.drafting import Drafter
from compressed_spec.testing import (
    AlternatingDrafter,
    OracleDrafter,
    RandomDrafter,
    Reference,
    WrongDrafter,
    greedy_text,
)

COUNT = 3 * 8 + 2 * 8 + 4
PROMPTS = range(1, 9)  # every phase of ratios 4 and 8 and of the window
SHAPES = ["s3_k1_d4", "s7_k1_d8", "s3_k2_d6", "s2_k3_d9", "s4_k2_d11"]


@pytest.fixture(scope="module")
def prompts(text: list[int]) -> list[list[int]]:
    return [text[:n] for n in PROMPTS]


@pytest.fixture(scope="module")
def expected(mixed: Reference, prompts: list[list[int]]) -> list[list[int]]:
    """Plain greedy decoding of each prompt alone, one token a forward."""
    return [greedy_text(mixed.model, prompt, COUNT) for prompt in prompts]


def make(kind: str, prompts: list[list[int]], expected: list[list[int]]) -> Drafter:
    texts = [prompt + continuation for prompt, continuation in zip(prompts, expected, strict=True)]
    drafters: dict[str, Drafter] = {
        "oracle": OracleDrafter(texts, 48),
        "wrong": WrongDrafter(texts, 48),
        "alternating": AlternatingDrafter(texts, 48),
        "random": RandomDrafter(48, seed=3),
    }
    return drafters[kind]


@pytest.mark.filterwarnings("ignore:None of .* tokens drafted")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["oracle", "wrong", "alternating", "random"])
def test_T12_any_drafter_long(
    mixed: Reference, prompts: list[list[int]], expected: list[list[int]], kind: str, shape: str
) -> None:
    """Eight requests in five rows, so that rows join and leave in the middle of the run."""
    outs = generate(
        mixed.model,
        prompts,
        tree=shape,
        drafter=make(kind, prompts, expected),
        max_new_tokens=COUNT,
        stop_token_ids=[],
        batch_size=5,
    )
    assert [out.token_ids for out in outs] == expected
    accepted = [out.stats.num_accepted_tokens for out in outs]
    assert all(accepted) if kind in ("oracle", "alternating") else kind == "random" or not any(accepted)


def test_T12_tree_off(mixed: Reference, prompts: list[list[int]], expected: list[list[int]]) -> None:
    outs = generate(mixed.model, prompts, tree="off", max_new_tokens=COUNT, stop_token_ids=[], batch_size=3)
    assert [out.token_ids for out in outs] == expected


@pytest.mark.filterwarnings("ignore:None of .* tokens drafted")
@pytest.mark.parametrize("num_nodes", range(2, 17))
@pytest.mark.parametrize("top_k", [1, 3])
def test_T12_every_number_of_nodes(
    mixed: Reference, prompts: list[list[int]], expected: list[list[int]], num_nodes: int, top_k: int
) -> None:
    """Rounds that are wholly right and wholly wrong by turns, as chains and trees of 2 to 16 nodes."""
    steps = num_nodes - 1 if top_k == 1 else -(-(num_nodes - 1) // top_k)
    outs = generate(
        mixed.model,
        prompts,
        tree=f"s{steps}_k{top_k}_d{num_nodes}",
        drafter=make("alternating", prompts, expected),
        max_new_tokens=COUNT // 2,
        stop_token_ids=[],
    )
    assert [out.token_ids for out in outs] == [tokens[: COUNT // 2] for tokens in expected]


@pytest.mark.filterwarnings("ignore:None of .* tokens drafted")
@pytest.mark.parametrize("name", ["mtp", "ngram"])
@pytest.mark.parametrize("shape", ["s4_k1_d5", "s3_k2_d6", "s3_k4_d16"])
def test_T12_the_drafters_of_the_package(
    mixed: Reference, prompts: list[list[int]], expected: list[list[int]], name: str, shape: str
) -> None:
    outs = generate(
        mixed.model, prompts, tree=shape, drafter=name, max_new_tokens=COUNT, stop_token_ids=[], batch_size=4
    )
    assert [out.token_ids for out in outs] == expected


def test_T12_a_stack_of_each_kind(reference: Reference, text: list[int]) -> None:
    prompts = [text[:n] for n in (1, 6, 11)]
    expected = [greedy_text(reference.model, prompt, COUNT) for prompt in prompts]
    outs = generate(
        reference.model,
        prompts,
        tree="s5_k2_d10",
        drafter=make("alternating", prompts, expected),
        max_new_tokens=COUNT,
        stop_token_ids=[],
        batch_size=2,
    )
    assert [out.token_ids for out in outs] == expected
