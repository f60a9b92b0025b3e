"""The row plan against its definition, spelled out with Python sets: who sees which position and which entry.

A row is read back as what it holds: ("token", sequence, position) if committed, else ("node", flat index).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressed_spec import TokenTree
from compressed_spec.layout import CacheShape, Compression, StateSpec
from compressed_spec.rows import CompressionPlan, Ints, RowPlan, make_plan, plan_nodes, selected_rows
from compressed_spec.testing import Reference, assert_near

MAX_LENGTH = 64
Meaning = tuple[str, int, int] | tuple[str, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A round: the cache's shape, the trees and where they grow."""

    window: int
    compressions: tuple[Compression, ...]
    batch_size: int
    trees: tuple[TokenTree, ...]
    sequences: tuple[int, ...]
    starts: tuple[int, ...]

    def plan(self, slots: Ints | None = None, some: Ints | None = None) -> RowPlan:
        spec = StateSpec(
            sliding_window=self.window,
            num_layers=1,
            head_dim=4,
            compressions=self.compressions,
            head_layers=0,
            head_shift=0,
            num_streams=4,
            model_dim=4,
            dtype=torch.float64,
            buffer_dtype=torch.float64,
        )
        shape = CacheShape(
            batch_size=self.batch_size, max_length=MAX_LENGTH, max_nodes=64, prefill_chunk=64, max_draft_nodes=64
        )
        device = torch.device("cpu")
        whole = make_plan(spec, shape, self.trees, self.sequences, self.starts, device, slots=slots)
        if some is None:
            return whole
        return plan_nodes(spec, shape, whole.nodes.take(some), whole.tokens_T.numpy()[some], device)

    def nodes(self) -> list["Node"]:
        nodes: list[Node] = []
        for tree, sequence, start in zip(self.trees, self.sequences, self.starts, strict=True):
            first = len(nodes)
            for node in range(len(tree)):
                path = tuple(first + ancestor for ancestor in tree.path_to(node))
                nodes.append(Node(sequence=sequence, start=start, path=path))
        return nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node and its ancestors, flat, root first, itself last."""

    sequence: int
    start: int
    path: tuple[int, ...]

    @property
    def position(self) -> int:
        return self.start + len(self.path) - 1

    def at(self, position: int) -> Meaning:
        """What holds a position as this node sees it."""
        if position < 0:
            return None
        return (
            ("token", self.sequence, position) if position < self.start else ("node", self.path[position - self.start])
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    compressions = tuple(
        Compression(
            ratio=ratio, overlap=overlap, num_layers=1, entry_dim=4, index_dim=4 * overlap, index_topk=topk * overlap
        )
        for ratio, overlap, topk in draw(
            st.lists(
                st.tuples(st.sampled_from((2, 3, 4, 5, 8, 16)), st.booleans(), st.sampled_from((1, 3, 100))),
                max_size=3,
                unique_by=lambda kind: kind[:2],
            )
        )
    )
    batch_size = draw(st.integers(1, 3))
    sequences = draw(st.lists(st.integers(0, batch_size - 1), min_size=1, max_size=batch_size, unique=True))
    trees = []
    for _ in sequences:
        size = draw(st.integers(1, 12))
        chain = draw(st.booleans())
        parents = [-1] + [node - 1 if chain else draw(st.integers(0, node - 1)) for node in range(1, size)]
        trees.append(TokenTree(tokens=range(size), parents=parents))
    starts = draw(st.lists(st.integers(0, 40), min_size=len(trees), max_size=len(trees)))
    return Case(
        window=draw(st.integers(1, 12)),
        compressions=compressions,
        batch_size=batch_size,
        trees=tuple(trees),
        sequences=tuple(sequences),
        starts=tuple(starts),
    )


def ring_meaning(row: int, ring: int, case: Case) -> Meaning:
    """What a ring's row holds: the newest committed position of its slot."""
    if row < 0:
        return None
    if row >= case.batch_size * ring:
        return ("node", row - case.batch_size * ring)
    sequence, slot = divmod(row, ring)
    start = case.starts[case.sequences.index(sequence)]  # another sequence's row would not be found
    held = [position for position in range(max(0, start - ring), start) if position % ring == slot]
    assert held, f"row {row} of a ring of {ring} was never written"
    return ("token", sequence, held[0])


def entry_meaning(row: int, comp: Compression, case: Case, closers: Sequence[int]) -> Meaning:
    """What an entry's row holds: ("entry", sequence, index) if committed, else the node that closes it."""
    per_sequence = MAX_LENGTH // comp.ratio
    if row < 0:
        return None
    if row >= case.batch_size * per_sequence:
        node = row - case.batch_size * per_sequence
        assert node in closers
        return ("node", node)
    sequence, index = divmod(row, per_sequence)
    assert index < case.starts[case.sequences.index(sequence)] // comp.ratio, f"entry {index} is not committed"
    return ("entry", sequence, index)


def visible_entries(node: Node, ratio: int) -> list[Meaning]:
    """Entries in order: closed by committed tokens, then by the node's ancestors and itself."""
    return [
        ("entry", node.sequence, j) if (j + 1) * ratio <= node.start else node.at((j + 1) * ratio - 1)
        for j in range((node.position + 1) // ratio)
    ]


@settings(max_examples=250, deadline=None)
@given(case=cases())
def test_T11_windows_and_positions(case: Case) -> None:
    plan, nodes = case.plan(), case.nodes()
    assert plan.tokens_T.tolist() == [token for tree in case.trees for token in tree.tokens]
    assert plan.position_T.tolist() == [node.position for node in nodes]
    for node, rows in zip(nodes, plan.window_rows_TW.tolist(), strict=True):
        seen = [ring_meaning(row, case.window, case) for row in rows]
        expected = {node.at(p) for p in range(max(0, node.position - case.window + 1), node.position + 1)}
        assert set(seen) - {None} == expected
        assert len([meaning for meaning in seen if meaning]) == len(expected), "a row is listed twice"
        assert ("node", node.path[-1]) in seen, "every node sees itself, so no list is empty"
    for node, row in zip(nodes, plan.parent_stream_T.tolist(), strict=True):
        assert row == (node.sequence if len(node.path) == 1 else case.batch_size + node.path[-2])


@settings(max_examples=250, deadline=None)
@given(case=cases())
def test_T11_entries(case: Case) -> None:
    plan, nodes = case.plan(), case.nodes()
    for comp in case.compressions:
        rows, ratio = plan.compressions[comp.name], comp.ratio
        closers = [i for i, node in enumerate(nodes) if (node.position + 1) % ratio == 0]
        assert rows.phase_T.tolist() == [node.position % ratio for node in nodes]
        assert rows.entry_position_C.tolist() == [nodes[i].position // ratio * ratio for i in closers]
        assert rows.closing_slot_C.tolist() == closers
        for closer, pooled in zip(closers, rows.pool_rows_CS.tolist(), strict=True):
            node = nodes[closer]
            positions = range(node.position - comp.span + 1, node.position + 1)
            assert [ring_meaning(row, comp.span, case) for row in pooled] == [node.at(p) for p in positions]
        check_visible(case, comp, rows, nodes, closers)


def check_visible(case: Case, comp: Compression, rows: CompressionPlan, nodes: list[Node], closers: list[int]) -> None:
    visible = [visible_entries(node, comp.ratio) for node in nodes]
    assert rows.num_visible == max(map(len, visible))
    assert (rows.listed_TK is None) == bool(comp.index_topk and rows.num_visible > comp.index_topk)
    # What the indexer may choose, by entry index: nothing beyond what a node sees, and each exactly once.
    every = torch.arange(rows.num_visible).expand(len(nodes), -1)
    counts = torch.tensor([[len(entries)] for entries in visible])
    lists = [selected_rows(rows.reach, torch.where(every < counts, every, -1))]
    lists += [] if rows.listed_TK is None else [rows.listed_TK]
    for listed in lists:
        for entries, row_ids in zip(visible, listed.tolist(), strict=True):
            seen = [entry_meaning(row, comp, case, closers) for row in row_ids]
            assert seen == entries + [None] * (len(seen) - len(entries))
    end = 0
    for tree, span, sequence, start in zip(case.trees, rows.spans, case.sequences, case.starts, strict=True):
        base = sequence * (MAX_LENGTH // comp.ratio)
        assert span == (end, end + len(tree), base, start // comp.ratio)
        end += len(tree)


@pytest.mark.parametrize("start", [1, 9])
def test_T11_root_sees_prefix_and_itself_only(mixed: Reference, text: list[int], start: int) -> None:
    """The root's logits do not depend on what hangs below it."""
    cache = mixed.model.new_cache(max_length=40)
    mixed.model.prefill(cache, [text[:start]])
    expected = mixed.after(text[: start + 1]).logits_V
    for parents in ([-1], [-1, 0, 0, 0, 0], [-1, 0, 1, 2, 3], [-1, 0, 1, 1, 0]):
        tree = TokenTree(tokens=[text[start], 7, 8, 9, 10][: len(parents)], parents=parents)
        assert_near(mixed.model.verify(cache, [tree]).logits[0], expected, f"root of {parents}")


@settings(max_examples=100, deadline=None)
@given(case=cases(), data=st.data())
def test_T11_slots(case: Case, data: st.DataObject) -> None:
    """In other slots the lists are the same but for the scratch rows they name, of some nodes as of all."""
    plain, count = case.plan(), len(case.nodes())
    slots = np.asarray(data.draw(st.permutations(range(count + 5)))[:count])
    some = np.asarray(sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1))))
    placed = case.plan(slots)
    assert placed.slot_T is None or placed.slot_T.tolist() == slots.tolist()
    assert placed.nodes.slot_T.tolist() == slots.tolist()
    part = case.plan(slots, some)
    assert part.nodes.slot_T.tolist() == slots[some].tolist()

    def check(name: str, plain_rows: torch.Tensor, placed_rows: torch.Tensor, persistent: int) -> None:
        moved = plain_rows.clone()
        moved[plain_rows >= persistent] = torch.from_numpy(slots)[plain_rows[plain_rows >= persistent] - persistent]
        moved[plain_rows >= persistent] += persistent
        assert torch.equal(placed_rows, moved), name

    num_rows = case.batch_size * case.window
    check("window", plain.window_rows_TW, placed.window_rows_TW, num_rows)
    check("part of the windows", plain.window_rows_TW[some], part.window_rows_TW, num_rows)
    check("stream", plain.parent_stream_T, placed.parent_stream_T, case.batch_size)
    for comp in case.compressions:
        before, after, fewer = (plan.compressions[comp.name] for plan in (plain, placed, part))
        check("pooled", before.pool_rows_CS, after.pool_rows_CS, case.batch_size * comp.span)
        check(
            "own entries",
            before.reach.extra_rows_TX,
            after.reach.extra_rows_TX,
            case.batch_size * (MAX_LENGTH // comp.ratio),
        )
        assert after.closing_slot_C.tolist() == slots[before.closing_slot_C.numpy()].tolist()
        closing = set(after.closing_slot_C.tolist())
        assert fewer.closing_slot_C.tolist() == [slot for slot in slots[some].tolist() if slot in closing]
        grouped = itertools.groupby(plain.nodes.sequence_T[some].tolist())
        assert [end - first for first, end, _, _ in fewer.spans] == [len(list(group)) for _, group in grouped]
