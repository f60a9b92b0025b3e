"""Rows of a batch do not know of each other."""

import random

import pytest
import torch

from compressed_spec import TokenTree, generate
from compressed_spec.testing import (
    Reference,
    assert_near,
    assert_same_state,
    live_state,
    prefilled,
    random_text,
    random_tree,
    raw_bytes,
)


@pytest.mark.parametrize("seed", range(3))
def test_T15_ragged_rounds(reference: Reference, seed: int) -> None:
    """Rows of different lengths in any order, some left out of a round, 0 to all of their drafts accepted."""
    model, rng = reference.model, random.Random(seed)
    texts = [random_text(60, seed=i) for i in range(4)]
    cache = prefilled(model, [text[:n] for text, n in zip(texts, (1, 7, 12, 20), strict=True)], max_nodes=64)
    for _ in range(8):
        rows = rng.sample(range(4), rng.randint(1, 4))
        starts = [cache.lengths[row] for row in rows]
        futures = [texts[row][n : n + rng.choice((1, 2, 5, 9))] for row, n in zip(rows, starts, strict=True)]
        trees = [  # the future as a chain, and a few leaves beside it
            TokenTree(tokens=[*future, 3, 4], parents=[*range(-1, len(future) - 1), 0, len(future) - 1])
            for future in futures
        ]
        verify = model.verify(cache, trees, rows=rows)
        accepted = [rng.choice((0, 1, len(future))) for future in futures]
        first = 0
        for row, n, tree, future in zip(rows, starts, trees, futures, strict=True):
            for i in range(len(future)):
                expected = reference.after(texts[row][: n + i + 1]).logits_V
                assert_near(verify.logits[first + i], expected, f"row {row}, {n} + {i}")
            first += len(tree)
        # Node ids may come as a list, a range or a tensor.
        paths = [list(range(a)) if a % 2 else torch.arange(a) for a in accepted]
        cache.commit(verify, paths)  # type: ignore[arg-type]
        assert [cache.lengths[row] for row in rows] == [n + a for n, a in zip(starts, accepted, strict=True)]
    for row, text in enumerate(texts):
        alone = reference.after(text[: cache.lengths[row]]).cache
        assert_same_state(live_state(cache, row), live_state(alone), f"row {row}")


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8])
def test_T15_requests_that_finish_early_leave_the_others_alone(
    mixed: Reference, text: list[int], batch_size: int
) -> None:
    """Stop tokens end the requests at different rounds; each equals its run alone."""
    prompts = [text[n : n + 1 + 3 * n] for n in range(6)]
    alone = [generate(mixed.model, [prompt], max_new_tokens=20, stop_token_ids=[5, 10, 12])[0] for prompt in prompts]
    together = generate(mixed.model, prompts, max_new_tokens=20, stop_token_ids=[5, 10, 12], batch_size=batch_size)
    assert [out.token_ids for out in together] == [out.token_ids for out in alone]
    assert [out.finish_reason for out in together] == [out.finish_reason for out in alone]
    assert len({len(out.token_ids) for out in alone}) > 1


def test_T16_a_verify_writes_no_persistent_row(reference: Reference, text: list[int]) -> None:
    model, rng = reference.model, random.Random(16)
    cache = prefilled(model, [text[:5], text[:20], text[:11]], max_nodes=32)
    before = [raw_bytes(cache, row) for row in range(3)]
    trees = [random_tree(rng, 5, num_nodes=10, vocab_size=48) for _ in range(3)]
    verify = model.verify(cache, trees)
    assert [raw_bytes(cache, row) for row in range(3)] == before
    cache.commit(verify, [[], [], []])
    assert [raw_bytes(cache, row) for row in range(3)] == before
    assert cache.lengths == (5, 20, 11)


@pytest.mark.parametrize("row", range(3))
def test_T16_only_the_committed_row_changes(reference: Reference, text: list[int], row: int) -> None:
    """Its neighbours, a free row among them, stay as they are to the byte, in a verify of all and of one."""
    model = reference.model
    cache = prefilled(model, [text[:5], text[:20], text[:11], text[:1]], max_nodes=40)
    cache.release(3)
    before = [raw_bytes(cache, i) for i in range(4)]
    verify = model.verify(cache, [TokenTree.chain(text[:9]) for _ in range(3)])
    cache.commit(verify, [range(9) if i == row else [] for i in range(3)])
    verify = model.verify(cache, [TokenTree.chain(text[9:18])], rows=[row])
    cache.commit(verify, [range(9)])
    model.prefill(cache, [text[18:21]], rows=[row])
    for other in {0, 1, 2, 3} - {row}:
        assert raw_bytes(cache, other) == before[other], f"row {other}"
    n = (5, 20, 11)[row]
    expected = reference.after(text[:n] + text[:21])
    assert_same_state(live_state(cache, row), live_state(expected.cache), f"row {row}")


def test_T16_rows_that_take_part_add_nothing_to_those_that_matter(reference: Reference, text: list[int]) -> None:
    """Logits of a row, alone and beside three dummies with trees of their own."""
    model, rng = reference.model, random.Random(1)
    cache = prefilled(model, [text[:n] for n in (14, 3, 30, 8)], max_nodes=64)
    tree = random_tree(rng, 5, num_nodes=8, vocab_size=48)
    alone = model.verify(cache, [tree], rows=[0]).logits
    dummies = [random_tree(rng, 0, num_nodes=13, vocab_size=48) for _ in range(3)]
    beside = model.verify(cache, [*dummies, tree], rows=[2, 1, 3, 0]).logits
    assert_near(beside[-8:], alone, "beside dummies")
