"""How a prefill is cut does not show, nor whether tokens came by prefill or by verification."""

import random

import pytest

from compressed_spec import TokenTree
from compressed_spec.testing import Reference, assert_near, assert_same_state, live_state, random_text

LENGTHS = (1, 7, 16, 37)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 8, 9, 11, 64])
def test_T14_chunks_of_a_batch_then_a_verify(reference: Reference, text: list[int], chunk: int) -> None:
    """1, ratio - 1, ratio, ratio + 1 of both ratios, the window; chunks are filled with several rows' tokens."""
    model = reference.model
    cache = model.new_cache(batch_size=4, max_length=50, max_nodes=16, prefill_chunk=chunk)
    logits = model.prefill(cache, [text[:n] for n in LENGTHS])
    verify = model.verify(cache, [TokenTree.chain(text[n : n + 4]) for n in LENGTHS])
    for row, n in enumerate(LENGTHS):
        expected = reference.after(text[:n])
        assert_near(logits[row], expected.logits_V, f"logits after {n} tokens")
        assert_same_state(live_state(cache, row), live_state(expected.cache), f"{n} tokens")
        for i in range(4):
            assert_near(verify.logits[4 * row + i], reference.after(text[: n + i + 1]).logits_V, f"{n} + {i}")


@pytest.mark.parametrize("seed", range(4))
def test_T14_random_pieces(reference: Reference, text: list[int], seed: int) -> None:
    """Prefills that continue a row, verifications and their commits, in any order and of any size."""
    model, rng = reference.model, random.Random(seed)
    cache = model.new_cache(batch_size=2, max_length=90, max_nodes=24, prefill_chunk=rng.choice((2, 5, 32)))
    texts = [text, random_text(90, seed=1)]
    while min(cache.lengths) < 30:
        row = rng.randrange(2)
        n = cache.lengths[row]
        piece = texts[row][n : n + rng.randint(1, 11)]
        if n > 45:
            continue
        if rng.random() < 0.5:
            logits_V = model.prefill(cache, [piece], rows=[row])[0]
        else:
            verify = model.verify(cache, [TokenTree.chain(piece)], rows=[row])
            cache.commit(verify, [range(len(piece))])
            logits_V = verify.logits[-1]
        expected = reference.after(texts[row][: n + len(piece)])
        assert_near(logits_V, expected.logits_V, f"{n} + {len(piece)}")
    for row in range(2):
        expected = reference.after(texts[row][: cache.lengths[row]])
        assert_same_state(live_state(cache, row), live_state(expected.cache), f"row {row}")
