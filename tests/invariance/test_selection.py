"""Attention and the indexer, whose inputs are lists: of other lengths, in other rows, of other entries beside it.

R = pool rows, T = nodes, W = window, K = entries listed, N = entries
"""

import pytest
import torch

from compressed_spec.kernels.attention import rowwise_attention, sparse_attention
from compressed_spec.kernels.indexer import index_scores, rowwise_index_scores, select_entries
from compressed_spec.testing import assert_near, assert_same_bits

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
pytestmark = [pytest.mark.usefixtures("threads"), pytest.mark.parametrize("dtype", DTYPES, ids=str)]


def random_tensor(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


class Lists:
    """21 nodes with windows and entries of their own, of any length from 0; whatever nobody lists is NaN."""

    num_nodes = 21

    def __init__(self, dtype: torch.dtype, *, heads: int, width: int, window: int, longest: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.q = random_tensor(self.num_nodes, heads, width, dtype=dtype, seed=1)
        self.sink = random_tensor(heads, dtype=torch.promote_types(dtype, torch.float32), seed=2)
        self.window = random_tensor(200, width, dtype=dtype, seed=3)
        self.entries = random_tensor(400, width, dtype=dtype, seed=4)
        self.window_rows = torch.randint(0, 199, (self.num_nodes, window), generator=generator)
        self.window_rows[torch.rand(self.window_rows.shape, generator=generator) < 0.2] = -1
        lengths = [0, 1, longest, *torch.randint(0, longest, (self.num_nodes - 3,), generator=generator).tolist()]
        self.entry_rows = torch.full((self.num_nodes, longest), -1)
        for node, length in enumerate(lengths):
            self.entry_rows[node, :length] = torch.randperm(399, generator=generator)[:length]
        self.lengths = lengths
        self.window[199], self.entries[399] = float("nan"), float("nan")

    def attend(self, nodes: list[int], num_listed: int | None = None) -> torch.Tensor:
        """Attention of some nodes, with lists cut (or filled up with -1) to `num_listed`."""
        rows = self.entry_rows[nodes]
        if num_listed is not None:
            rows = torch.nn.functional.pad(rows, (0, num_listed - rows.shape[1]), value=-1)
        return rowwise_attention(self.q[nodes], self.window, self.window_rows[nodes], self.entries, rows, self.sink)


SHAPES = [(4, 16, 8, 3), (3, 33, 7, 70), (8, 64, 64, 130), (64, 32, 128, 64)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    heads, width, window, longest = shape
    lists = Lists(dtype, heads=heads, width=width, window=window, longest=longest)
    together = lists.attend(list(range(21)))
    for node, length in enumerate(lists.lengths):
        assert_same_bits(lists.attend([node], length)[0], together[node], f"node {node} alone, {length} entries")
    for company in ([20, 3, 2], [1, 0], list(range(20, -1, -1)), [5] * 9):
        for num_listed in (longest, longest + 1, longest + 200):
            beside = lists.attend(company, num_listed)
            for place, node in enumerate(company):
                assert_same_bits(beside[place], together[node], f"node {node} at {place}, lists of {num_listed}")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_of_the_same_rows_elsewhere(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """An entry may be committed for one node and scratch for another: the row id says nothing."""
    heads, width, window, longest = shape
    lists = Lists(dtype, heads=heads, width=width, window=window, longest=longest)
    expected = lists.attend(list(range(21)))
    place = torch.randperm(400, generator=torch.Generator().manual_seed(9))
    moved = torch.empty_like(lists.entries)
    moved[place] = lists.entries
    lists.entries = moved
    lists.entry_rows = torch.where(lists.entry_rows < 0, -1, place[lists.entry_rows])
    assert_same_bits(lists.attend(list(range(21))), expected, "moved rows")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_is_near_the_plain_one(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    heads, width, window, longest = shape
    lists = Lists(dtype, heads=heads, width=width, window=window, longest=longest)
    plain = sparse_attention(
        lists.q.double(), lists.window.double(), lists.window_rows, lists.entries.double(), lists.entry_rows, lists.sink
    )
    actual = lists.attend(list(range(21)))
    assert actual.dtype == dtype
    assert_near(actual.double(), plain, "attention", tolerance=4 * torch.finfo(dtype).eps)


class Index:
    """A sequence of 300 index keys, of which any number may be committed and the rest be a chain's own."""

    heads, width, num_keys = 5, 9, 300

    def __init__(self, dtype: torch.dtype, num_nodes: int) -> None:
        wide = torch.promote_types(dtype, torch.float32)
        self.q = random_tensor(num_nodes, self.heads, self.width, dtype=dtype, seed=1).to(wide)
        self.weights = random_tensor(num_nodes, self.heads, dtype=wide, seed=2)
        self.keys = random_tensor(self.num_keys, self.width, dtype=dtype, seed=3)

    def scores(
        self, nodes: list[int], count: int, visible: list[int], base: int = 0, scratch: int = 400
    ) -> torch.Tensor:
        """Scores of some nodes that see `visible` entries each, `count` of them committed."""
        most = max(visible)
        pool = torch.full((1000, self.width), float("nan"), dtype=self.keys.dtype)
        pool[base : base + count] = self.keys[:count]
        pool[scratch : scratch + most - count] = self.keys[count:most]
        entries = torch.arange(count, most).expand(len(nodes), -1)
        rows = torch.where(entries < torch.tensor(visible)[:, None], entries - count + scratch, -1)
        spans = ((0, len(nodes), base, count),)
        return rowwise_index_scores(self.q[nodes], self.weights[nodes], pool, spans, rows, most)


def test_index_scores(dtype: torch.dtype) -> None:
    """Each node alone against all of its entries committed, then in company, with the newest entries in scratch."""
    index = Index(dtype, num_nodes=19)
    visible = [300 - 5 * (node % 4) for node in range(19)]
    alone = [index.scores([node], seen, [seen])[0] for node, seen in enumerate(visible)]
    for company in (list(range(19)), [18, 0, 7], [3] * 8, [11]):
        for count, base, scratch in ((285, 0, 400), (280, 37, 401), (256, 1, 333), (101, 64, 555), (0, 0, 500)):
            seen = [visible[node] for node in company]
            scores = index.scores(company, count, seen, base, scratch)
            for place, node in enumerate(company):
                here = scores[place]
                assert_same_bits(here[: visible[node]], alone[node], f"node {node} at {place}, {count} committed")
                assert bool((here[visible[node] :] == float("-inf")).all())


def test_index_scores_of_several_sequences(dtype: torch.dtype) -> None:
    """Three sequences of other lengths in one call, each with entries of its own, against each alone."""
    index = Index(dtype, num_nodes=12)
    pool = torch.full((1000, index.width), float("nan"), dtype=dtype)
    counts, firsts, bases = [40, 0, 131], [0, 5, 6, 12], [0, 200, 400]
    rows, scratch = torch.full((12, 2), -1), 700
    alone = []
    for i, (count, base) in enumerate(zip(counts, bases, strict=True)):
        pool[base : base + count] = index.keys[:count]
        pool[scratch : scratch + 2] = index.keys[count : count + 2]
        for node in range(firsts[i], firsts[i + 1]):
            num_own = node % 3
            rows[node, :num_own] = torch.arange(scratch, scratch + num_own)
            if count + num_own:
                alone.append(index.scores([node], count + num_own, [count + num_own])[0])
            else:
                alone.append(index.q.new_empty(0))
        scratch += 2
    spans = tuple((firsts[i], firsts[i + 1], bases[i], counts[i]) for i in range(3))
    scores = rowwise_index_scores(index.q, index.weights, pool, spans, rows, 133)
    for node, expected in enumerate(alone):
        assert_same_bits(scores[node, : len(expected)], expected, f"node {node}")
        assert bool((scores[node, len(expected) :] == float("-inf")).all())
    plain = index_scores(index.q, index.weights, pool, spans, rows, 133)
    assert bool((plain.isinf() == scores.isinf()).all())
    finite = ~plain.isinf()
    assert_near(scores[finite], plain[finite], "scores", tolerance=1e-5)


def test_select_entries(dtype: torch.dtype) -> None:
    """Many ties, and nodes of few entries beside nodes of many: each chooses as it does alone."""
    wide = torch.promote_types(dtype, torch.float32)
    scores = random_tensor(15, 90, dtype=wide, seed=1).mul(2).round()
    visible = [0, 1, 4, 5, 6, 90, *range(7, 88, 9)]
    for node, seen in enumerate(visible):
        scores[node, seen:] = float("-inf")
    together = select_entries(scores, 5)
    for node, seen in enumerate(visible):
        chosen = sorted(sorted(range(seen), key=lambda j: (-float(scores[node, j]), j))[:5])
        assert together[node, : len(chosen)].tolist() == chosen
        assert together[node, len(chosen) :].tolist() == [-1] * (5 - len(chosen))
