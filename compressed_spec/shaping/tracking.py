"""Acceptance by depth and rank, counted while decoding."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from compressed_spec.drafting.base import ScoredTree
from compressed_spec.drafting.scoring import Scoring
from compressed_spec.tree import TokenTree

FIRST_HAZARD, LATER_HAZARD = 0.6, 0.4  # what an unseen first, or later, child is taken to catch of what is left
PRIOR_WEIGHT = 4.0  # observations that a prior counts for
WINDOW = 512.0  # observations after which older ones fade
LARGEST_STEP = 1.0  # most that one recalibration changes a log score
LARGEST_BIAS = 4.0


@dataclass(slots=True, kw_only=True)
class _Cell:
    at_risk: float = 0.0
    hits: float = 0.0
    expected: float = 0.0
    accepted: float = 0.0


class AcceptanceTracker:
    """Learns from verified trees; a child's rank is its place among its siblings.

    A child is at risk where the target's text reached its parent and took none of its better siblings. Rates are built
    from these risks, so that those of siblings never add up to more than 1; a cell that has seen little leans on the
    same rank one level up.
    """

    def __init__(self) -> None:
        self._cells: dict[tuple[int, int], _Cell] = defaultdict(_Cell)

    def observe(self, tree: TokenTree, path: Sequence[int]) -> None:
        """A verified tree and its accepted path, root first."""
        children: dict[int, list[int]] = defaultdict(list)
        for node, parent in enumerate(tree.parents):
            children[parent].append(node)
        for depth, (node, taken) in enumerate(zip(path, [*path[1:], -1], strict=True), start=1):
            missed = True
            for rank, child in enumerate(children[node]):
                cell = self._cells[depth, rank]
                if missed:
                    cell.at_risk += 1
                    cell.hits += child == taken
                    missed = child != taken
                    if cell.at_risk > WINDOW:
                        cell.at_risk, cell.hits = cell.at_risk / 2, cell.hits / 2
                if isinstance(tree, ScoredTree):
                    cell.expected += tree.survival[child] / max(tree.survival[node], 1e-300)
                    cell.accepted += child == taken

    def acceptance(self, depth: int, rank: int) -> float:
        """The estimated rate of the child of this rank (from 0) at this depth (from 1)."""
        left = 1.0
        for better in range(rank):
            left *= 1 - self._hazard(depth, better)
        return left * self._hazard(depth, rank)

    def _hazard(self, depth: int, rank: int) -> float:
        if depth == 0:
            return LATER_HAZARD if rank else FIRST_HAZARD
        cell = self._cells.get((depth, rank), _Cell())
        return (cell.hits + PRIOR_WEIGHT * self._hazard(depth - 1, rank)) / (cell.at_risk + PRIOR_WEIGHT)

    def recalibrated(self, scoring: Scoring) -> Scoring:
        """The scoring whose survivals would have met what was accepted since the last call; forgets that then."""
        seen = [cell for cell, counts in self._cells.items() if counts.expected]
        if not seen:
            return scoring
        deepest = max(len(scoring.log_bias), *(depth for depth, _ in seen))
        widest = max(*(rank for _, rank in seen), *map(len, scoring.log_bias or [[0.0]])) + 1
        table = []
        for depth in range(1, deepest + 1):
            row = []
            for rank in range(widest):
                cell = self._cells.get((depth, rank), _Cell())
                step = math.log((cell.accepted + PRIOR_WEIGHT) / (cell.expected + PRIOR_WEIGHT))
                step = min(max(step, -LARGEST_STEP), LARGEST_STEP)
                row.append(min(max(scoring.bias(depth, rank) + step, -LARGEST_BIAS), LARGEST_BIAS))
            table.append(tuple(row))
        for cell in self._cells.values():
            cell.expected = cell.accepted = 0.0
        return Scoring(
            greedy_temperature=scoring.greedy_temperature,
            sampled_temperature=scoring.sampled_temperature,
            log_bias=tuple(table),
        )
