"""The law of what `generate` emits, measured over many seeds."""

import math
from collections import Counter
from typing import Any

import pytest

from compressed_spec import generate
from compressed_spec.testing import Reference, greedy_text, random_model, random_text
from compressed_spec.testing.plain import plain_law

VOCAB, PROMPT = 48, random_text(6)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference(random_model((0, 4, 8)), max_length=64)


@pytest.fixture(scope="module")
def future(reference: Reference) -> list[int]:
    """Greedy text after PROMPT."""
    return greedy_text(reference.model, PROMPT, 32)


# Laws

NUM_TEXTS, NUM_TOKENS = 1500, 3
LAWS: list[tuple[str, str, dict[str, Any]]] = [
    ("coupled", "s3_k2_d6", {"temperature": 1.0, "top_k": 4}),
    ("target", "s3_k2_d6", {"temperature": 1.5, "top_p": 0.8}),
    ("leviathan", "s3_k1_d4", {"temperature": 1.0, "min_p": 0.1}),
    ("leviathan", "s2_k1_d3", {"temperature": 0.5, "top_k": 4}),
    ("block", "s3_k1_d4", {"temperature": 1.5, "top_k": 4}),
    ("traversal", "s3_k2_d6", {"temperature": 1.0, "top_p": 0.9}),
    ("traversal", "s2_k3_d8", {"temperature": 1.5, "top_k": 4}),
]


@pytest.fixture(scope="module")
def eight() -> Reference:
    """A model of eight tokens."""
    return Reference(random_model((0, 4), vocab_size=8, n_routed_experts=2, index_topk=2), max_length=16)


def joint_law(reference: Reference, prompt: list[int], **law: Any) -> dict[tuple[int, ...], float]:
    """Probability of every continuation of NUM_TOKENS tokens that has any."""
    laws: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer: dict[tuple[int, ...], float] = {}
        for text, mass in laws.items():
            p_V = plain_law(reference.after([*prompt, *text]).logits_V, **law).tolist()
            longer |= {(*text, token): mass * p for token, p in enumerate(p_V) if p > 0}
        laws = longer
    assert sum(laws.values()) == pytest.approx(1)
    return laws


def chi_square(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """The statistic's distance from its mean, in standard deviations; cells that expect under 5 are pooled."""
    total = counts.total()
    cells = [(counts[text], total * p) for text, p in law.items()]
    small = [cell for cell in cells if cell[1] < 5]
    cells = [cell for cell in cells if cell[1] >= 5] + [(sum(c[0] for c in small), sum(c[1] for c in small))]
    cells = [cell for cell in cells if cell[1] > 0]
    degrees = len(cells) - 1
    assert degrees >= 10
    statistic = sum((count - expected) ** 2 / expected for count, expected in cells)
    return (statistic - degrees) / math.sqrt(2 * degrees)


@pytest.mark.parametrize(("verifier", "tree", "law"), LAWS, ids=str)
def test_T25_the_joint_law_of_three_tokens(eight: Reference, verifier: str, tree: str, law: dict[str, Any]) -> None:
    """Drafts by the MTP head; texts run on for two tokens more, so that rounds are as deep as the tree."""
    prompt = [3, 5, 2]
    outs = generate(
        eight.model,
        [prompt] * NUM_TEXTS,
        tree=tree,
        drafter="mtp",
        verifier=verifier,
        max_new_tokens=NUM_TOKENS + 2,
        seed=1,
        stop_token_ids=[],
        batch_size=250,
        **law,
    )
    assert sum(out.stats.num_accepted_tokens for out in outs) > NUM_TEXTS / 4
    counts = Counter(tuple(out.token_ids[:NUM_TOKENS]) for out in outs)
    expected = joint_law(eight, prompt, **law)
    assert counts.keys() <= expected.keys(), "a token of probability 0 was emitted"
    assert chi_square(counts, expected) < 4
    # The test can fail: a temperature a little off shows.
    other = joint_law(eight, prompt, **(law | {"temperature": law["temperature"] * 1.4}))
    assert chi_square(counts, {text: other.get(text, 0.0) for text in expected}) > 5


@pytest.mark.filterwarnings("ignore:None of .* tokens drafted")
@pytest.mark.parametrize(("verifier", "tree"), [(verifier, tree) for verifier, tree, _ in LAWS if tree != "s2_k3_d8"])
def test_T26_certain_and_impossible_tokens(reference: Reference, future: list[int], verifier: str, tree: str) -> None:
    """With one token left by a filter, every rule emits it; excluded tokens are never emitted, likely as they were."""
    options: dict[str, Any] = {
        "tree": tree,
        "verifier": verifier,
        "drafter": "mtp",
        "max_new_tokens": 16,
        "stop_token_ids": [],
    }
    laws: list[dict[str, Any]] = [{"temperature": 50.0, "top_k": 1}, {"temperature": 1e-9}, {"temperature": 0.0}]
    for law in laws:
        assert generate(reference.model, [PROMPT], **options, **law)[0].token_ids == future[:16]
    bias = dict.fromkeys(set(future), -math.inf)
    for out in generate(reference.model, [PROMPT] * 4, temperature=1.0, logit_bias=bias, **options):
        assert not set(out.token_ids) & set(future)
