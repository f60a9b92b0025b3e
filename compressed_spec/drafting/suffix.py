"""What followed the newest tokens before, in this text and in earlier ones, as a tree by frequency.

After SuffixDecoding (arXiv 2411.04975): the longer the match, the deeper the tree; a path's score is the product of how
often each of its tokens followed. Here the match is kept by suffix automata, whose cost a token does not grow.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from compressed_spec.drafting.automaton import BOUNDARY, Cursor, SuffixAutomaton
from compressed_spec.drafting.base import DraftRequest, ScoredTree

MAX_DEPTH = 32  # deepest continuation whose frequencies are exact


class PastTexts:
    """Finished outputs, the oldest forgotten: two automata, the elder dropped when the younger is half of `capacity`.

    capacity: most tokens held; 0 holds none.
    """

    def __init__(self, capacity: int, horizon: int) -> None:
        self._capacity, self._horizon = capacity, horizon
        self.automata: tuple[SuffixAutomaton, ...] = (SuffixAutomaton(horizon),) if capacity else ()

    @property
    def num_tokens(self) -> int:
        return sum(automaton.num_tokens for automaton in self.automata)

    def add(self, token_ids: Sequence[int]) -> None:
        """Remember a finished output, or its last part if it alone is beyond half of the capacity."""
        half = self._capacity // 2
        if half < 2 or not token_ids:
            return
        kept = [*token_ids[-(half - 1) :], BOUNDARY]
        if self.automata[0].num_tokens + len(kept) > half:
            self.automata = (SuffixAutomaton(self._horizon), self.automata[0])
        self.automata[0].extend(kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A cursor in an automaton that had `num_tokens` when the cursor was set."""

    automaton: SuffixAutomaton
    num_tokens: int
    cursor: Cursor


@dataclass(slots=True, kw_only=True)
class _Row:
    """A request's own text: its automaton, its newest tokens, its output, and its place in those of past texts."""

    automaton: SuffixAutomaton
    recent: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    past: list[_Place] = field(default_factory=list)


class SuffixDrafter:
    """Proposes, best first, the most frequent continuations of the newest tokens. Needs no weights and no training.

    max_match: longest context looked for. depth_factor: depth of a tree for each matched token. past_tokens: most
    tokens of other requests' finished outputs that are remembered, 0 for none.
    Raises ValueError for a max_match below 1, a depth_factor not above 0, or negative past_tokens.
    """

    def __init__(self, max_match: int = 32, depth_factor: float = 2.0, past_tokens: int = 1 << 17) -> None:
        if max_match < 1 or depth_factor <= 0 or past_tokens < 0:
            raise ValueError(
                "A suffix drafter needs max_match of at least 1, depth_factor above 0 and past_tokens not below 0, got "
                f"{max_match}, {depth_factor}, {past_tokens}."
            )
        self._max_match, self._depth_factor = max_match, depth_factor
        self._horizon = max_match + MAX_DEPTH
        self._past = PastTexts(past_tokens, self._horizon)
        self._rows: dict[int, _Row] = {}

    def start(self, row: int, token_ids: Sequence[int]) -> None:
        self._rows[row] = _Row(automaton=SuffixAutomaton(self._horizon))
        self._append(self._rows[row], token_ids[:-1])
        self.observe(row, token_ids[-1:])

    def observe(self, row: int, token_ids: Sequence[int]) -> None:
        self._rows[row].output += token_ids
        self._append(self._rows[row], token_ids)

    def release(self, row: int) -> None:
        finished = self._rows.pop(row, None)
        if finished is not None:
            self._past.add(finished.output)

    def _append(self, row: _Row, token_ids: Sequence[int]) -> None:
        row.automaton.extend(token_ids)
        row.recent = [*row.recent, *token_ids][-self._max_match :]
        for place in row.past:
            for token in token_ids:
                place.automaton.advance(place.cursor, token)

    def propose(self, request: DraftRequest) -> list[ScoredTree]:
        """A tree a row: at most N deep, K children a node, D nodes. Of all contexts the one that promises most."""
        trees = []
        for row, root, cap in zip(request.rows, request.roots, request.max_depths, strict=True):
            best = ScoredTree(tokens=[root], parents=[-1], survival=[1.0])
            max_depth = min(request.shape.num_steps, cap, MAX_DEPTH)
            for place in self._places(self._rows[row]):
                for context in place.automaton.contexts(place.cursor, self._max_match):
                    depth = min(max_depth, max(1, math.floor(self._depth_factor * context.length)))
                    if depth <= sum(best.survival) - 1:
                        break  # a shorter context's tree is no deeper, and each level adds at most 1
                    tree = _grow(place.automaton, context.state, root, depth, request)
                    if sum(tree.survival) > sum(best.survival):
                        best = tree
            trees.append(best)
        return trees

    def _places(self, row: _Row) -> list[_Place]:
        """The row's place in its own automaton, and in those of past texts as they are now."""
        kept = []
        for automaton in self._past.automata:
            place = next((place for place in row.past if place.automaton is automaton), None)
            # What was appended since may hold more of the row's text than the cursor could find.
            if place is None or place.num_tokens != automaton.num_tokens:
                place = _Place(automaton=automaton, num_tokens=automaton.num_tokens, cursor=Cursor())
                for token in row.recent:
                    automaton.advance(place.cursor, token)
            kept.append(place)
        row.past = kept
        own = row.automaton
        return [_Place(automaton=own, num_tokens=own.num_tokens, cursor=own.newest), *kept]


def _grow(automaton: SuffixAutomaton, state: int, root: int, max_depth: int, request: DraftRequest) -> ScoredTree:
    """The most probable continuations of a context, by empirical frequency, best first."""
    shape = request.shape
    tokens, parents, depths, scores = [root], [-1], [0], [0.0]
    heap: list[tuple[float, int, int, int, int, int]] = []
    newest, newest_state = 0, state
    while True:
        if depths[newest] < max_depth:
            following = automaton.continuations(newest_state)
            total = sum(times for _, times, _ in following)
            edge = 0.0
            for rank, (token, times, after) in enumerate(following[: shape.top_k]):
                own = request.scoring.corrected(math.log(times / total), depth=depths[newest] + 1, rank=rank)
                edge = min(edge, own)  # a better rank never scores below a worse one
                # Of equal scores the shallower, then the earlier comes first.
                heapq.heappush(heap, (-(scores[newest] + edge), depths[newest] + 1, newest, rank, token, after))
        if not heap or len(tokens) == shape.num_nodes:
            break
        score, depth, parent, _, token, newest_state = heapq.heappop(heap)
        newest = len(tokens)
        tokens.append(token)
        parents.append(parent)
        depths.append(depth)
        scores.append(-score)
    return ScoredTree(tokens=tokens, parents=parents, survival=[math.exp(score) for score in scores])
