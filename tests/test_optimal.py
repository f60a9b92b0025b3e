"""Topologies, the files that hold them, and the dynamic programme against every tree there is."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressed_spec.shaping.optimal import expected_length, optimal_topology
from compressed_spec.shaping.static import read_topology
from compressed_spec.topology import Topology


def test_topology_from_paths_and_parents() -> None:
    paths = [[1], [0, 0], [0], [0, 0, 0], [1, 0], [0, 1]]
    topology = Topology.from_paths(paths)
    assert topology.parents == (-1, 0, 0, 1, 1, 2, 3)
    assert topology.depths == [0, 1, 1, 2, 2, 2, 3]
    assert topology.ranks == [0, 0, 1, 0, 1, 0, 0]
    assert topology.expanded == [[0], [1, 2], [3]]
    assert (topology.shape.num_steps, topology.shape.top_k, topology.shape.num_nodes) == (3, 2, 7)
    assert Topology.ordered([-1, 0, 1, 1, 0, 2, 4]) == topology


@pytest.mark.parametrize("paths", [[[1]], [[0], [0]], [[]], [[0], [1, 0]], [[-1]], [[0], [0, 1]], [[0], [2]]])
def test_paths_that_are_no_tree(paths: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="path"):
        Topology.from_paths(paths)


def test_topology_must_be_level_by_level() -> None:
    with pytest.raises(ValueError, match="level by level"):
        Topology(parents=(-1, 0, 1, 0))


@pytest.mark.parametrize(
    ("content", "parents"),
    [
        ({"parents": [-1, 0, 1, 0]}, (-1, 0, 0, 1)),
        ([[0], [0, 0], [1]], (-1, 0, 0, 1)),
    ],
)
def test_topology_files(tmp_path: Path, content: object, parents: tuple[int, ...]) -> None:
    (tmp_path / "tree.json").write_text(json.dumps(content))
    assert read_topology(str(tmp_path / "tree.json")).parents == parents


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"parents": "x"}', '{"parents": [-1]}', '{"parents": [-1, 5]}', "[[0], [2]]", '[["a"]]', "3"],
)
def test_topology_files_that_hold_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "tree.json").write_text(content)
    with pytest.raises(ValueError, match=r"topology file .*tree\.json"):
        read_topology(str(tmp_path / "tree.json"))
    with pytest.raises(ValueError, match=r"nowhere\.json"):
        read_topology(str(tmp_path / "nowhere.json"))


def every_topology(num_nodes: int) -> Iterator[Topology]:
    """Each ordered tree of so many nodes once: the next node may hang from the newest node or any ancestor of it."""

    def grow(parents: list[int]) -> Iterator[list[int]]:
        if len(parents) == num_nodes:
            yield parents
            return
        node = len(parents) - 1
        while node >= 0:
            yield from grow([*parents, node])
            node = parents[node]

    for parents in grow([-1]):
        yield Topology.ordered(parents)


def test_every_topology_is_counted_by_catalan() -> None:
    assert [len({t.parents for t in every_topology(n)}) for n in range(1, 7)] == [1, 1, 2, 5, 14, 42]


rates = st.floats(0, 1).map(lambda rate: round(rate, 3))


@given(
    acceptance=st.lists(st.lists(rates, min_size=1, max_size=3), min_size=1, max_size=4),
    num_nodes=st.integers(2, 7),
)
@settings(max_examples=60, deadline=None)
def test_optimal_equals_brute_force(acceptance: list[list[float]], num_nodes: int) -> None:
    def fits(topology: Topology) -> bool:
        if topology.shape.num_steps > len(acceptance):
            return False
        return all(
            rank < len(acceptance[depth - 1])
            for depth, rank in zip(topology.depths[1:], topology.ranks[1:], strict=True)
        )

    candidates = [t for n in range(2, num_nodes + 1) for t in every_topology(n) if fits(t)]
    best = max(expected_length(t, acceptance) for t in candidates)
    if best == 1.0:
        with pytest.raises(ValueError, match="tree='off'"):
            optimal_topology(acceptance, num_nodes)
        return
    found = optimal_topology(acceptance, num_nodes)
    assert len(found) <= num_nodes
    assert expected_length(found, acceptance) == pytest.approx(best, abs=1e-12)


def test_optimal_of_plain_cases() -> None:
    sure = [[0.9, 0.05]] * 8
    assert optimal_topology(sure, 6).parents == (-1, 0, 1, 2, 3, 4)
    unsure = [[0.3, 0.25, 0.2]] * 8
    assert optimal_topology(unsure, 4).parents == (-1, 0, 0, 0)
    # The second child is the better one: worth its better-ranked sibling.
    assert optimal_topology([[0.1, 0.6], [0.5]], 4).parents == (-1, 0, 0, 2)


@pytest.mark.parametrize(
    ("acceptance", "num_nodes", "message"),
    [
        ([[0.5]], 1, "at least 2 nodes"),
        ([], 4, "at least one depth"),
        ([[0.5], []], 4, "at least one rank"),
        ([[1.5]], 4, "between 0 and 1"),
        ([[0.0]], 4, "tree='off'"),
    ],
)
def test_optimal_refuses(acceptance: list[list[float]], num_nodes: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        optimal_topology(acceptance, num_nodes)
