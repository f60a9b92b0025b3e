"""Memory that no committed token owns is never read: NaN there changes nothing."""

import random

import pytest
import torch

from compressed_spec import TokenTree, generate
from compressed_spec.cache import Cache
from compressed_spec.decode import Decoder, Request
from compressed_spec.drafting import MTPDrafter
from compressed_spec.sampling_params import SamplingParams
from compressed_spec.testing import (
    Reference,
    assert_near,
    assert_same_state,
    live_state,
    poison,
    prefilled,
    random_text,
    random_tree,
)
from compressed_spec.tree import TreeShape
from compressed_spec.verifying import make_verifier


def tree_with(rng: random.Random, future: list[int], vocab_size: int) -> tuple[TokenTree, list[int]]:
    """A random tree with `future` hidden in it, and the path of node ids where it lies."""
    tree = random_tree(rng, future[0], num_nodes=rng.randint(1, 8), vocab_size=vocab_size)
    tokens, parents, path = list(tree.tokens), list(tree.parents), [0]
    for token in future[1:]:
        if rng.random() < 0.5:  # noise between, so that the path is scattered
            tokens.append(rng.randrange(vocab_size))
            parents.append(rng.randrange(len(tokens) - 1))
        tokens.append(token)
        parents.append(path[-1])
        path.append(len(tokens) - 1)
    return TokenTree(tokens=tokens, parents=parents), path


def test_T05_a_long_run_with_all_unowned_rows_poisoned_before_each_round(reference: Reference) -> None:
    """Two rows, random trees and accepted lengths; the rings go round many times."""
    model, rng = reference.model, random.Random(5)
    texts = [random_text(90, seed=1), random_text(90, seed=2)]
    cache = prefilled(model, [texts[0][:1], texts[1][:6]])
    while min(cache.lengths) < 64:
        poison(cache)
        futures = [text[n : n + rng.choice((1, 2, 3, 6, 13))] for text, n in zip(texts, cache.lengths, strict=True)]
        trees, paths = zip(*(tree_with(rng, future, 48) for future in futures), strict=True)
        before = cache.lengths
        verify = model.verify(cache, trees)
        assert bool(torch.isfinite(verify.logits).all())
        firsts = (0, len(trees[0]))
        for text, n, first, path in zip(texts, before, firsts, paths, strict=True):
            for i, node in enumerate(path):
                expected = reference.after(text[: n + i + 1]).logits_V
                assert_near(verify.logits[first + node], expected, f"token {n + i}")
        cache.commit(verify, [path[: rng.randint(0, len(path))] for path in paths])
        if max(cache.lengths) > 75:
            break
    cache.check_integrity()
    for row, text in enumerate(texts):
        alone = reference.after(text[: cache.lengths[row]]).cache
        assert_same_state(live_state(cache, row), live_state(alone), f"row {row}")


def test_T06_pools_begin_as_nan_and_no_nan_is_read(reference: Reference, text: list[int]) -> None:
    model = reference.model
    cache = model.new_cache(max_length=40, max_nodes=8)
    assert all(bool(pool.isnan().all()) for pool in cache.pools.values())
    # The first tokens see an unfilled window and no entry at all, which must be finite too.
    verify = model.verify(cache, [TokenTree(tokens=text[:5], parents=[-1, 0, 0, 1, 3])])
    assert bool(torch.isfinite(verify.logits).all())
    cache.commit(verify, [[0, 1, 3]])
    cache.check_integrity()
    tokens = [text[0], text[1], text[3]]
    assert_same_state(live_state(cache), live_state(reference.after(tokens).cache), "after three tokens")


def test_T06_check_integrity_finds_a_nan_in_an_owned_row(mixed: Reference, text: list[int]) -> None:
    for name in prefilled(mixed.model, [text[:20]]).pools:
        cache = prefilled(mixed.model, [text[:20], text[:3]])
        cache.check_integrity()
        cache.pools[name][0, 0, 0] = float("nan")
        with pytest.raises(ValueError, match=f"Pool {name} holds values that are not finite in row 0"):
            cache.check_integrity()


@pytest.mark.parametrize("first", [3, 17, 40])
def test_T06_the_second_request_in_a_slot_is_as_in_a_fresh_cache(mixed: Reference, text: list[int], first: int) -> None:
    model = mixed.model
    cache: Cache = model.new_cache(max_length=64, max_nodes=8)
    other = random_text(40, seed=9)
    model.prefill(cache, [other[:first]])
    cache.release(0)
    for n in (1, 2, 9):
        model.prefill(cache, [text[:n]])
        assert_same_state(live_state(cache), live_state(mixed.after(text[:n]).cache), f"{n} tokens after {first}")
        cache.release(0)

    def decode(decoder: Decoder, prompt: list[int]) -> list[int]:
        decoder.submit(
            Request(prompt_ids=tuple(prompt), params=SamplingParams(), max_new_tokens=20, stop_token_ids=frozenset())
        )
        emitted: list[int] = []
        while decoder.has_work:
            emitted += [token for chunk in decoder.step() for token in chunk.token_ids]
        return emitted

    decoder = Decoder(
        model,
        cache,
        drafter=MTPDrafter(model),
        shape=TreeShape(num_steps=2, top_k=2, num_nodes=4),
        verifier=make_verifier("coupled"),
    )
    decode(decoder, other[:first])
    fresh = generate(model, [text[:7]], max_new_tokens=20, stop_token_ids=[])[0].token_ids
    assert decode(decoder, text[:7]) == fresh
