"""Random models, batches, trees, accepted paths and chunks, against one token at a time."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressed_spec.cache import Cache
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.testing import (
    Reference,
    assert_near,
    assert_same_state,
    live_state,
    poison,
    random_model,
    random_text,
    random_tree,
)

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A model's stack: by ratio (CSA is 4), or by kind with a rate of each."""

    ratios: tuple[int, ...] | None
    kinds: tuple[str, ...]
    csa_rate: int
    hca_rate: int
    window: int
    topk: int
    num_hash: int

    def model(self) -> DeepseekV4:
        overrides: dict[str, Any] = {
            "sliding_window": self.window,
            "index_topk": self.topk,
            "num_hash_layers": self.num_hash,
            "index_n_heads": 4,
            "n_routed_experts": 3,
        }
        if self.ratios is None:
            overrides |= {
                "layer_types": list(self.kinds),
                "num_hidden_layers": len(self.kinds),
                "compress_rates": {CSA: self.csa_rate, HCA: self.hca_rate},
            }
        return random_model(self.ratios, seed=self.window * 31 + self.topk, **overrides)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    by_ratio = draw(st.booleans())
    ratios = draw(st.lists(st.sampled_from((0, 2, 3, 4, 4, 5, 8, 16)), min_size=1, max_size=3))
    kinds = draw(st.lists(st.sampled_from((SLIDING, CSA, HCA)), min_size=1, max_size=3))
    num_layers = len(ratios) if by_ratio else len(kinds)
    return Setup(
        ratios=tuple(ratios) if by_ratio else None,
        kinds=tuple(kinds),
        csa_rate=draw(st.sampled_from((2, 3, 4, 6))),
        hca_rate=draw(st.sampled_from((1, 2, 3, 5, 8, 16))),
        window=draw(st.integers(1, 12)),
        topk=draw(st.integers(1, 8)),
        num_hash=draw(st.integers(0, num_layers)),
    )


class Run:
    """Two sequences in a cache of three rows, and what they consist of so far."""

    def __init__(self, model: DeepseekV4, rng: random.Random) -> None:
        self.model, self.rng, self.reference = model, rng, Reference(model, max_length=64)
        self.cache: Cache = model.new_cache(
            batch_size=3, max_length=64, max_nodes=24, prefill_chunk=rng.choice((1, 2, 3, 5, 7, 30))
        )
        self.texts: list[list[int]] = [random_text(rng.randint(1, 9), seed=rng.randrange(2**32)) for _ in range(2)]
        logits = model.prefill(self.cache, self.texts, rows=[2, 0])
        for i, text in enumerate(self.texts):
            assert_near(logits[i], self.reference.after(text).logits_V, f"prompt {i}")

    def rows(self) -> list[tuple[int, int]]:
        """(text, row) of those that take part, in random order."""
        return self.rng.sample([(0, 2), (1, 0)], self.rng.randint(1, 2))

    def round(self) -> None:
        parts = self.rows()
        trees = [
            random_tree(self.rng, self.rng.randrange(48), num_nodes=self.rng.randint(1, 12), vocab_size=48)
            for _ in parts
        ]
        verify = self.model.verify(self.cache, trees, rows=[row for _, row in parts])
        first, paths = 0, []
        for (i, _), tree in zip(parts, trees, strict=True):
            path = tree.path_to(self.rng.randrange(len(tree)))
            for depth, node in enumerate(path):
                tokens = self.texts[i] + [tree.tokens[n] for n in path[: depth + 1]]
                assert_near(verify.logits[first + node], self.reference.after(tokens).logits_V, f"text {i}, {path}")
            paths.append(path[: self.rng.randint(0, len(path))])
            self.texts[i] = self.texts[i] + [tree.tokens[node] for node in paths[-1]]
            first += len(tree)
        self.cache.commit(verify, paths)

    def prefill(self) -> None:
        i, row = self.rows()[0]
        piece = [self.rng.randrange(48) for _ in range(self.rng.randint(1, 6))]
        self.texts[i] = self.texts[i] + piece
        logits = self.model.prefill(self.cache, [piece], rows=[row])
        assert_near(logits[0], self.reference.after(self.texts[i]).logits_V, f"text {i} + {len(piece)}")

    def copy(self) -> None:
        """Away and back through a snapshot and a fork."""
        _, row = self.rows()[0]
        snapshot = self.cache.snapshot([row])
        self.cache.release(row)
        self.cache.restore(snapshot, rows=[1])
        self.cache.fork(1, row)
        self.cache.release(1)

    def check(self) -> None:
        self.cache.check_integrity()
        for i, row in ((0, 2), (1, 0)):
            expected = self.reference.after(self.texts[i])
            assert_same_state(live_state(self.cache, row), live_state(expected.cache), f"text {i}")


@settings(max_examples=20, deadline=None, print_blob=True)
@given(setup=setups(), seed=st.integers(0, 2**32))
def test_T02_T08_T14_T15_random_runs(setup: Setup, seed: int) -> None:
    run = Run(setup.model(), random.Random(seed))
    for _ in range(5):
        poison(run.cache)
        run.rng.choice((run.round, run.round, run.prefill, run.copy))()
    run.check()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=400, deadline=None, print_blob=True)
@given(setup=setups(), seed=st.integers(0, 2**32))
def test_T02_T08_T14_T15_many_random_runs(setup: Setup, seed: int) -> None:
    run = Run(setup.model(), random.Random(seed))
    for _ in range(8):
        poison(run.cache)
        run.rng.choice((run.round, run.round, run.prefill, run.copy))()
    run.check()
