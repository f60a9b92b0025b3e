"""Lists with braces, against nested loops; trees against the definition of sN_kK_dD."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressed_spec.measure.expansion import expand, expand_numbers, expand_trees

WORDS = st.text("abk_:.", min_size=1, max_size=4).filter(lambda word: ".." not in word)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A range as it is written, and its numbers counted one by one."""
    first, last = draw(st.integers(0, 20)), draw(st.integers(0, 20))
    step = draw(st.none() | st.integers(1, 5))
    numbers, at = [], first
    while (at <= last) if first <= last else (at >= last):
        numbers.append(str(at))
        at += (step or 1) if first <= last else -(step or 1)
    return f"{first}..{last}" + ("" if step is None else f"..{step}"), numbers


@st.composite
def braces(draw: st.DrawFn) -> tuple[str, list[str]]:
    parts = draw(st.lists(ranges() | WORDS.map(lambda word: (word, [word])), min_size=1, max_size=3))
    return "{" + ",".join(text for text, _ in parts) + "}", [one for _, values in parts for one in values]


@st.composite
def terms(draw: st.DrawFn) -> tuple[str, list[str]]:
    pieces = draw(st.lists(WORDS.map(lambda word: (word, [word])) | braces(), min_size=1, max_size=3))
    found = [""]
    for _, values in pieces:
        longer = []
        for beginning in found:
            for value in values:
                longer.append(beginning + value)
        found = longer
    return "".join(text for text, _ in pieces), found


@given(st.lists(terms(), min_size=1, max_size=3), st.sampled_from([",", ", "]))
def test_braces_multiply_out_as_nested_loops_do(some: Sequence[tuple[str, list[str]]], comma: str) -> None:
    assert expand(comma.join(text for text, _ in some)) == [item for _, items in some for item in items]


def candidates(steps: int, top_k: int) -> int:
    """Draft nodes grown one by one: the root has K children, and K of each newest level have K each."""
    total = level = top_k
    for _ in range(steps - 1):
        level = min(level, top_k) * top_k
        total += level
    return total


@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=4, unique=True),
    st.lists(st.integers(0, 4), min_size=1, max_size=3, unique=True),
    st.lists(st.integers(0, 24), min_size=1, max_size=6, unique=True),
)
def test_combinations_that_make_no_tree_are_skipped_and_counted(
    steps: list[int], top_ks: list[int], nodes: list[int]
) -> None:
    trees = []
    for n in steps:
        for k in top_ks:
            for d in nodes:
                possible = n >= 1 and k >= 1 and 2 <= d <= 1 + candidates(n, k)
                if possible and (k > 1 or d == n + 1):
                    trees.append(f"s{n}_k{k}_d{d}")
    count = len(steps) * len(top_ks) * len(nodes)
    text = "off,s{{{}}}_k{{{}}}_d{{{}}},auto".format(*(",".join(map(str, some)) for some in (steps, top_ks, nodes)))
    if not trees:
        with pytest.raises(ValueError):
            expand_trees(text)
        return
    found = expand_trees(text)
    assert found.names == ("off", *trees, "auto")
    assert found.num_skipped == count - len(trees)


def test_the_usual_list() -> None:
    found = expand_trees("off,s3_k2_d6,s{2..7}_k{1,2,3}_d{2..16},auto")
    chains = [name for name in found.names if "_k1_" in name]
    assert chains == [f"s{n}_k1_d{n + 1}" for n in range(2, 8)]
    assert len(found.names) == len(set(found.names))
    assert found.names[:2] == ("off", "s3_k2_d6")
    assert len(found.names) - 2 + found.num_skipped == 6 * 3 * 15  # s3_k2_d6 is one of them; off and auto are none


@pytest.mark.parametrize(
    "text",
    [
        "",
        "off,",
        "s{2..3",
        "s2..3}_k1",
        "s{2,{3}}_k1_d3",
        "s{2..4..0}_k1_d3",
        "s3_k1_d9",
        "z{2..3}_k1_d3",
        "s{2..9}_k0_d4",
    ],
)
def test_a_list_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        expand_trees(text)


def test_numbers() -> None:
    assert expand_numbers("--batch-sizes", "1,2,{4..16..4},2", least=1, whole=True) == [1, 2, 4, 8, 12, 16]
    for text in ("0", "1.5", "x", "1,,2", "nan"):
        with pytest.raises(ValueError):
            expand_numbers("--batch-sizes", text, least=1, whole=True)
    assert expand_numbers("--temperatures", "0,0.7", least=0, whole=False) == [0.0, 0.7]
    for text in ("-1", "nan", "inf"):
        with pytest.raises(ValueError, match="--temperatures"):
            expand_numbers("--temperatures", text, least=0, whole=False)
