"""The whole model in its invariant numerics: trees, batches, chunks and commits leave no trace in any bit."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from compressed_spec import TokenTree, load_model
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.names import DraftHeadKind
from compressed_spec.testing import Reference, assert_near, assert_same_bits, live_state, random_model, random_text

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
ODD: dict[str, Any] = {
    "hidden_size": 36,
    "head_dim": 18,
    "moe_intermediate_size": 17,
    "q_lora_rank": 15,
    "o_lora_rank": 7,
    "index_head_dim": 9,
    "index_n_heads": 5,
    "n_routed_experts": 7,
    "num_experts_per_tok": 3,
}
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "head_dim": 64,
    "moe_intermediate_size": 128,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "sliding_window": 66,
    "index_head_dim": 32,
    "index_topk": 5,
}
DSPARK: dict[str, Any] = {"draft_head": DraftHeadKind.DSPARK, "num_draft_layers": 2}
MODELS = {"small": {}, "odd": ODD, "wide": WIDE, "dspark": DSPARK}
LENGTH = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A tree that follows a text for a while, and its nodes on the text."""

    tree: TokenTree
    path: tuple[int, ...]


def draft_along(text: Sequence[int], rng: random.Random, num_nodes: int) -> Draft:
    """A random tree whose root is `text[0]`, and of whose nodes about half continue the text."""
    tokens, parents, path = [text[0]], [-1], [0]
    for node in range(1, num_nodes):
        if rng.random() < 0.5 and len(path) < len(text):
            tokens.append(text[len(path)])
            parents.append(path[-1])
            path.append(node)
        else:
            tokens.append(rng.randrange(48))
            parents.append(rng.randrange(node))
    return Draft(tree=TokenTree(tokens=tokens, parents=parents), path=tuple(path))


def model_of(kind: str, dtype: torch.dtype, numerics: str = "invariant") -> DeepseekV4:
    return random_model((0, 4, 8, 4), dtype=dtype, numerics=numerics, **MODELS[kind])


def follow(reference: Reference, rng: random.Random, batch_size: int, num_rounds: int, num_nodes: int = 16) -> int:
    """Prefill and verify random trees, commit parts of their paths, and compare every bit with the plain run.

    Returns the number of logit rows compared.
    """
    texts = [random_text(LENGTH, seed=seed) for seed in range(batch_size)]
    cache = reference.model.new_cache(
        batch_size=batch_size,
        max_length=LENGTH + 20,
        max_nodes=num_nodes * batch_size,
        prefill_chunk=rng.choice((1, 3, 7, 16, 64)),
    )
    starts = [rng.randrange(1, 24) for _ in texts]
    logits_BV = reference.model.prefill(cache, [text[:n] for text, n in zip(texts, starts, strict=True)])
    for logits_V, text, n in zip(logits_BV, texts, starts, strict=True):
        assert_same_bits(logits_V, reference.after(text[:n]).logits_V, f"prefill of {n}")
    num_compared = batch_size
    for _ in range(num_rounds):
        rows = sorted(rng.sample(range(batch_size), rng.randint(1, batch_size)))
        rows = [row for row in rows if cache.lengths[row] < LENGTH - 1]
        if not rows:
            break
        drafts = [draft_along(texts[row][cache.lengths[row] :], rng, rng.randint(1, num_nodes)) for row in rows]
        verify = reference.model.verify(cache, [draft.tree for draft in drafts], rows=rows)
        first = 0
        for row, draft in zip(rows, drafts, strict=True):
            for depth, node in enumerate(draft.path):
                n = cache.lengths[row] + depth + 1
                assert_same_bits(verify.logits[first + node], reference.after(texts[row][:n]).logits_V, f"{n} tokens")
                num_compared += 1
            first += len(draft.tree)
        cache.commit(verify, [draft.path[: rng.randint(0, len(draft.path))] for draft in drafts])
    for row, text in enumerate(texts):
        n = cache.lengths[row]
        expected = live_state(reference.after(text[:n]).cache)
        for name, rows_LnD in live_state(cache, row).items():
            assert_same_bits(rows_LnD, expected[name], f"{name} of {n} tokens")
    return num_compared


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["small", "odd", "dspark"])
def test_T14_every_bit_of_random_rounds(kind: str, dtype: torch.dtype) -> None:
    """Trees and chains of up to 16 nodes, batches of 1, 3 and 8, five chunk sizes, partial and empty commits."""
    reference = Reference(model_of(kind, dtype), max_length=LENGTH + 20)
    rng = random.Random(f"{kind}/{dtype}")
    compared = sum(follow(reference, rng, batch_size, num_rounds=5) for batch_size in (1, 3, 8))
    assert compared > 60


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_T14_every_bit_of_a_wider_model(dtype: torch.dtype) -> None:
    """Matrices of several blocks, a window of more than one block of keys."""
    reference = Reference(model_of("wide", dtype), max_length=LENGTH + 20)
    assert follow(reference, random.Random(1), batch_size=3, num_rounds=4) > 20


@pytest.mark.slow
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", list(MODELS))
def test_T14_every_bit_of_many_random_rounds(kind: str, dtype: torch.dtype) -> None:
    reference = Reference(model_of(kind, dtype), max_length=LENGTH + 20)
    for seed in range(12):
        follow(reference, random.Random(f"{kind}/{dtype}/{seed}"), batch_size=(1, 3, 8)[seed % 3], num_rounds=12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_fast_numerics_are_not_invariant(dtype: torch.dtype) -> None:
    """What the tests above would find: the plain run and a chain of two differ in some bit."""
    reference = Reference(model_of("small", dtype, numerics="fast"), max_length=LENGTH + 20)
    with pytest.raises(AssertionError, match="differ"):
        follow(reference, random.Random(0), batch_size=3, num_rounds=5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fast_and_invariant_differ_by_rounding(dtype: torch.dtype) -> None:
    text = random_text(60)
    logits = []
    for numerics in ("fast", "invariant"):
        model = model_of("small", dtype, numerics)
        cache = model.new_cache(max_length=80)
        model.prefill(cache, [text[:52]])
        logits.append(model.verify(cache, [TokenTree.chain(text[52:])]).logits)
    bound = {torch.float32: 1e-4, torch.float64: 1e-11, torch.bfloat16: 0.2}[dtype]
    assert_near(logits[1], logits[0], "logits", tolerance=bound)


def test_T36_invariant_numerics_are_for_a_cpu() -> None:
    with pytest.raises(ValueError, match="Invariant numerics hold on a CPU only, not on cuda"):
        load_model("nowhere", numerics="invariant", device="cuda")
