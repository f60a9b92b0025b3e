"""The suffix automaton against counting by hand, and the drafter that reads it."""

import functools
import itertools
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressed_spec.cache import Cache
from compressed_spec.drafting import DraftRequest
from compressed_spec.drafting.automaton import BOUNDARY, Cursor, SuffixAutomaton
from compressed_spec.drafting.base import ScoredTree
from compressed_spec.drafting.scoring import Scoring
from compressed_spec.drafting.suffix import SuffixDrafter
from compressed_spec.testing import prefilled, random_model
from compressed_spec.tree import TreeShape

texts = st.lists(st.integers(0, 2), max_size=40)


def occurrences(text: list[int], string: tuple[int, ...]) -> int:
    return sum(tuple(text[i : i + len(string)]) == string for i in range(len(text) - len(string) + 1))


@given(text=texts, horizon=st.integers(1, 6))
@settings(max_examples=80, deadline=None)
def test_counts_equal_counting_by_hand_after_every_token(text: list[int], horizon: int) -> None:
    automaton = SuffixAutomaton(horizon)
    for end, token in enumerate(text, start=1):
        automaton.extend([token])
        if end % 5 and end != len(text):
            continue
        for size in range(1, min(horizon, 4) + 1):
            for string in itertools.product(range(3), repeat=size):
                assert automaton.count(string) == occurrences(text[:end], string), string
    assert automaton.num_states <= max(1, 2 * len(text))
    assert automaton.num_tokens == len(text)


@given(text=texts, query=texts, horizon=st.integers(1, 6))
@settings(max_examples=80, deadline=None)
def test_cursor_is_the_longest_suffix_that_occurs(text: list[int], query: list[int], horizon: int) -> None:
    """The automaton grows while the cursor moves, so that states split under it."""
    automaton, cursor = SuffixAutomaton(horizon), Cursor()
    for step in range(max(len(text), len(query))):
        automaton.extend(text[step : step + 1])
        if step >= len(query):
            continue
        automaton.advance(cursor, query[step])
        seen, past = text[: step + 1], query[: step + 1]
        # A suffix that began to occur only later is not found: the cursor knows what occurred when it moved.
        assert occurrences(seen, tuple(past[len(past) - cursor.length :])) or cursor.length == 0
    cursor = Cursor()
    for token in query:
        automaton.advance(cursor, token)
    longest = max(n for n in range(min(horizon, len(query)) + 1) if n == 0 or occurrences(text, tuple(query[-n:])))
    assert cursor.length == longest


@given(text=st.lists(st.integers(0, 2), min_size=1, max_size=40), longest=st.integers(1, 5))
@settings(max_examples=80, deadline=None)
def test_contexts_and_continuations(text: list[int], longest: int) -> None:
    automaton = SuffixAutomaton(longest + 1)
    automaton.extend(text)
    found = {context.length: context.state for context in automaton.contexts(automaton.newest, longest)}
    assert list(found) == sorted(found, reverse=True)
    for size in range(1, min(longest, len(text)) + 1):
        suffix = tuple(text[-size:])
        followed = Counter(text[i + size] for i in range(len(text) - size) if tuple(text[i : i + size]) == suffix)
        holder = next((length for length in sorted(found) if length >= size), None)
        if not followed:
            assert holder is None
            continue
        assert holder is not None
        expected = sorted(((token, times) for token, times in followed.items()), key=lambda one: (-one[1], one[0]))
        assert [(token, times) for token, times, _ in automaton.continuations(found[holder])] == expected


def test_growth_is_linear() -> None:
    """The longest chains of links: a text of one token, and the Fibonacci word."""
    a, b = [0], [0, 1]
    while len(b) < 3000:
        a, b = b, b + a
    for text in ([7] * 3000, b[:3000]):
        automaton = SuffixAutomaton(16)
        automaton.extend(text)
        assert automaton.num_states <= 2 * len(text)
        assert automaton.count(text[:5]) == occurrences(text, tuple(text[:5]))


@functools.cache
def some_cache() -> Cache:
    return prefilled(random_model((0,)), [[1]])


def request_for(rows: list[int], roots: list[int], shape: TreeShape, scoring: Scoring | None = None) -> DraftRequest:
    return DraftRequest(
        cache=some_cache(),
        rows=tuple(rows),
        roots=tuple(roots),
        shape=shape,
        max_depths=(99,) * len(rows),
        temperatures=(0.0,) * len(rows),
        noise=None,
        scoring=Scoring() if scoring is None else scoring,
    )


def paths_of(tree: ScoredTree) -> dict[tuple[int, ...], float]:
    return {tuple(tree.tokens[i] for i in tree.path_to(node)[1:]): tree.survival[node] for node in range(1, len(tree))}


def test_tree_by_frequency() -> None:
    """After 5: 1 three times, 2 once. After 5 1: 9, 9 and 8."""
    drafter = SuffixDrafter(max_match=1)
    drafter.start(0, [5, 1, 9, 0, 5, 1, 9, 0, 5, 1, 8, 0, 5, 2, 7, 5])
    shape = TreeShape(num_steps=2, top_k=2, num_nodes=4)
    tree = drafter.propose(request_for([0], [5], shape))[0]
    assert paths_of(tree) == pytest.approx({(1,): 3 / 4, (1, 9): 1 / 2, (2,): 1 / 4})
    chain = drafter.propose(request_for([0], [5], TreeShape(num_steps=2, top_k=1, num_nodes=3)))[0]
    assert paths_of(chain) == pytest.approx({(1,): 3 / 4, (1, 9): 1 / 2})
    # A correction that halves every second child, and every node of the second level.
    scoring = Scoring(log_bias=((0.0, math.log(0.5)), (math.log(0.5),)))
    corrected = drafter.propose(request_for([0], [5], shape, scoring))[0]
    assert paths_of(corrected) == pytest.approx({(1,): 3 / 4, (1, 9): 1 / 4, (2,): 1 / 8})


def test_depth_follows_the_match() -> None:
    shape = TreeShape(num_steps=16, top_k=1, num_nodes=17)
    text = list(range(20))
    for matched, depth in ((1, 2), (2, 4), (4, 8)):
        drafter = SuffixDrafter()
        drafter.start(0, [*text, 99, *text[:matched]])
        tree = drafter.propose(request_for([0], [text[matched - 1]], shape))[0]
        assert list(tree.tokens) == text[matched - 1 : matched + depth]


def test_long_repeats_match_beyond_the_horizon() -> None:
    drafter = SuffixDrafter(max_match=4)
    drafter.start(0, [3] * 500)
    shape = TreeShape(num_steps=6, top_k=1, num_nodes=7)
    assert drafter.propose(request_for([0], [3], shape))[0].tokens == (3,) * 7


def test_rows_learn_from_finished_outputs_only() -> None:
    shape = TreeShape(num_steps=2, top_k=1, num_nodes=3)
    drafter = SuffixDrafter()
    drafter.start(0, [1, 2, 3])
    drafter.observe(0, [4, 5, 6])
    drafter.start(1, [9, 4])
    assert drafter.propose(request_for([1], [4], shape))[0].tokens == (4,)
    drafter.release(0)
    assert drafter.propose(request_for([1], [4], shape))[0].tokens == (4, 5, 6)
    drafter.observe(1, [5])
    assert drafter.propose(request_for([1], [5], shape))[0].tokens == (5, 6)
    forgetful = SuffixDrafter(past_tokens=0)
    forgetful.start(0, [1, 2, 3])
    forgetful.observe(0, [4, 5, 6])
    forgetful.release(0)
    forgetful.start(0, [9, 4])
    assert forgetful.propose(request_for([0], [4], shape))[0].tokens == (4,)


def test_past_outputs_are_bounded_and_the_newest_kept() -> None:
    drafter = SuffixDrafter(past_tokens=100)
    shape = TreeShape(num_steps=1, top_k=1, num_nodes=2)
    drafter.start(1, [0, 1])
    for number in range(40):
        drafter.start(0, [0, 7])
        drafter.observe(0, range(1000 + 10 * number, 1010 + 10 * number))
        drafter.release(0)
        assert drafter._past.num_tokens <= 100
        newest = 1000 + 10 * number
        drafter.observe(1, [newest])
        assert drafter.propose(request_for([1], [newest], shape))[0].tokens == (newest, newest + 1)
    drafter.start(0, [0, 7])
    drafter.observe(0, range(10_000))
    drafter.release(0)
    assert drafter._past.num_tokens <= 100
    drafter.observe(1, [9_990])
    assert drafter.propose(request_for([1], [9_990], shape))[0].tokens == (9_990, 9_991)
    assert BOUNDARY not in drafter.propose(request_for([1], [9_990], shape))[0].tokens


@pytest.mark.parametrize("options", [{"max_match": 0}, {"depth_factor": 0.0}, {"past_tokens": -1}])
def test_refusals(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="max_match"):
        SuffixDrafter(**options)
    with pytest.raises(ValueError, match="horizon"):
        SuffixAutomaton(0)
