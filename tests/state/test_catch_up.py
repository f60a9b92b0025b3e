"""Whatever a text's history, drafters stand where a full replay of it would have put them."""

from collections.abc import Sequence

import pytest
import torch

from compressed_spec import TokenTree
from compressed_spec.cache import Cache
from compressed_spec.drafting import DraftRequest, MTPDrafter, NgramDrafter
from compressed_spec.drafting.head import HeadSteps
from compressed_spec.testing import Reference, assert_near, live_state, prefilled, random_text
from compressed_spec.tree import TreeShape

SHAPE = TreeShape(num_steps=4, top_k=2, num_nodes=9)
OTHER = random_text(30, seed=8)


def request(cache: Cache, row: int, root: int) -> DraftRequest:
    return DraftRequest(
        cache=cache, rows=(row,), roots=(root,), shape=SHAPE, max_depths=(4,), temperatures=(0.0,), noise=None
    )


def by_prompt(reference: Reference, text: Sequence[int]) -> Cache:
    return prefilled(reference.model, [OTHER, text])


def by_single_tokens(reference: Reference, text: Sequence[int]) -> Cache:
    """Rounds without drafts, as with tree off."""
    cache = prefilled(reference.model, [OTHER, text[:1]])
    for token in text[1:]:
        verify = reference.model.verify(cache, [TokenTree(tokens=[token], parents=[-1])], rows=[1])
        cache.commit(verify, [[0]])
    return cache


def by_drafted_rounds(reference: Reference, text: Sequence[int]) -> Cache:
    """Drafts every round, of which none or some are accepted."""
    cache = prefilled(reference.model, [OTHER, text[:2]])
    drafter, count = MTPDrafter(reference.model), 1
    while (n := cache.lengths[1]) < len(text):
        drafter.propose(request(cache, 1, text[n]))
        future = list(text[n : n + count])
        junk = [(token + 1) % 48 for token in future]
        tree = TokenTree(tokens=[*future, *junk], parents=[*range(-1, len(future) - 1), *range(len(future))])
        verify = reference.model.verify(cache, [tree], rows=[1])
        cache.commit(verify, [range(len(future))])
        count = count % 5 + 1
    return cache


def by_rejected_rounds(reference: Reference, text: Sequence[int]) -> Cache:
    cache = prefilled(reference.model, [OTHER, text[: len(text) // 2]])
    for k in (3, 9):
        verify = reference.model.verify(cache, [TokenTree.chain(OTHER[:k])], rows=[1])
        cache.commit(verify, [[]])
    reference.model.prefill(cache, [text[len(text) // 2 :]], rows=[1])
    return cache


def by_restore(reference: Reference, text: Sequence[int]) -> Cache:
    """From another row of another cache, in the middle of the text."""
    source = prefilled(reference.model, [text[: len(text) // 2]])
    cache = prefilled(reference.model, [OTHER, OTHER], max_length=77)
    cache.restore(source.snapshot(), rows=[1])
    reference.model.prefill(cache, [text[len(text) // 2 :]], rows=[1])
    return cache


def by_fork(reference: Reference, text: Sequence[int]) -> Cache:
    cache = prefilled(reference.model, [text[: len(text) // 2], OTHER])
    cache.fork(0, 1)
    reference.model.prefill(cache, [text[len(text) // 2 :], OTHER[:3]], rows=[1, 0])
    return cache


HISTORIES = [by_prompt, by_single_tokens, by_drafted_rounds, by_rejected_rounds, by_restore, by_fork]


@pytest.mark.parametrize("length", [2, 3, 8, 9, 21])
@pytest.mark.parametrize("history", HISTORIES)
def test_T38_head_rows_and_drafts(mixed: Reference, text: list[int], history: object, length: int) -> None:
    """The head's rows, the pending stream, and what the head then says of every node of a first level."""
    assert callable(history)
    tokens, root = text[:length], text[length]
    cache = history(mixed, tokens)
    replayed = mixed.after(tokens).cache
    for pool in ("head_kv", "pending_stream"):
        assert_near(live_state(cache, 1)[pool], live_state(replayed)[pool], pool)
    fresh = prefilled(mixed.model, [tokens])
    laws = [
        HeadSteps(mixed.model, request(source, row, root)).root().log_q_BFV for source, row in ((cache, 1), (fresh, 0))
    ]
    assert_near(laws[0], laws[1], "the head's law")
    drafter = MTPDrafter(mixed.model)
    assert drafter.propose(request(cache, 1, root)) == drafter.propose(request(fresh, 0, root))


def test_T38_the_first_head_row_follows_the_second_token(mixed: Reference, text: list[int]) -> None:
    """A sequence of n tokens has n - 1 head rows: row t needs token t + 1."""
    for n in range(1, 12):
        assert live_state(prefilled(mixed.model, [text[:n]]))["head_kv"].shape[1] == min(n - 1, 8)


@pytest.mark.parametrize("length", [4, 10, 25])
def test_T38_drafting_again_gives_the_same_drafts(mixed: Reference, text: list[int], length: int) -> None:
    """Scratch rows of earlier drafts are forgotten, and a draft's rows of one batch do not mix."""
    cache = prefilled(mixed.model, [text[:length], OTHER])
    drafter = MTPDrafter(mixed.model)
    first = drafter.propose(request(cache, 0, 7))
    both = DraftRequest(
        cache=cache,
        rows=(1, 0),
        roots=(9, 7),
        shape=SHAPE,
        max_depths=(4, 4),
        temperatures=(0.0, 0.0),
        noise=None,
    )
    assert drafter.propose(both)[1] == first[0]
    cache.pools["head_kv"][:, cache.num_persistent("head_kv") :] = float("nan")
    assert drafter.propose(request(cache, 0, 7)) == first
    assert bool(torch.isfinite(cache.pools["head_kv"][:, cache.num_persistent("head_kv")]).all())


@pytest.mark.parametrize("pieces", [(1,), (3,), (1, 4, 2), (7, 1)])
def test_T38_ngram_after_rounds_of_any_size(mixed: Reference, pieces: tuple[int, ...]) -> None:
    tokens = [int(token) % 4 for token in random_text(40, seed=2)]  # few symbols, so that n-grams recur
    replayed, grown = NgramDrafter(), NgramDrafter()
    replayed.start(0, tokens)
    grown.start(0, OTHER)  # an earlier request in the row
    grown.release(0)
    grown.start(0, tokens[:9])
    grown.start(1, OTHER)
    at, i = 9, 0
    while at < len(tokens):
        size = pieces[i % len(pieces)]
        grown.observe(0, tokens[at : at + size])
        grown.observe(1, OTHER[:2])
        at, i = at + size, i + 1
    cache = mixed.model.new_cache(max_length=8)
    trees = grown.propose(request(cache, 0, tokens[-1]))
    assert trees == replayed.propose(request(cache, 0, tokens[-1]))
    assert len(trees[0]) > 1
