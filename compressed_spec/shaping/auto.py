"""The tree that pays: expected tokens against measured seconds, round by round, `auto`.

Two decisions. Before a round is drafted, past acceptance by depth and rank says how deep and wide to draft, or not to
draft at all. Once drafted, unless the drafts were drawn from a law, the nodes of the whole batch compete: they are kept
in descending order of survival as far as tokens a second still rise. Both weigh by the cost model, whose scale follows
the seconds that rounds really take. Whether speculation pays at all is decided by how fast it really was, against real
plain rounds as soon as there are some.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from compressed_spec.drafting.base import DraftPlan, ScoredTree
from compressed_spec.drafting.scoring import Scoring
from compressed_spec.shaping.base import RoundOutcome, RoundState
from compressed_spec.shaping.budget import Budget, best_budget
from compressed_spec.shaping.calibration import DEFAULT_SCORING
from compressed_spec.shaping.costs import CostModel
from compressed_spec.shaping.tracking import AcceptanceTracker
from compressed_spec.tree import TokenTree, TreeShape

DEFAULT_CAPS = TreeShape(num_steps=6, top_k=4, num_nodes=16)
REFRESH_EVERY = 16  # rounds between two looks at the statistics
RECALIBRATE_EVERY = 64  # verified trees
ENOUGH_DRAFTED, ENOUGH_PLAIN = 8, 1  # rounds before their speed counts; a plain round's tokens never vary
MEMORY = 64  # rounds of a kind after which older ones fade
FIRST_PLAIN, LONGEST_PLAIN = 8, 128  # while speculating: rounds until the next plain one, at first and later
FIRST_WAIT, LONGEST_WAIT = 32, 512  # while off: plain rounds until speculation gets another try
PATIENCE = 4  # how these waits grow
LARGEST_LOSS = 2.0  # plain rounds' time that a try may lose before it ends early
SMOOTHING = 0.1  # weight of the newest round in the scales of the cost model


@dataclass(slots=True, kw_only=True)
class _Speed:
    """Tokens and seconds of recent rounds of one kind."""

    num_rounds: int = 0
    tokens: float = 0.0
    seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        if self.num_rounds == MEMORY:
            self.num_rounds, self.tokens, self.seconds = MEMORY // 2, self.tokens / 2, self.seconds / 2
        self.num_rounds += 1
        self.tokens += tokens
        self.seconds += seconds

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(slots=True, kw_only=True)
class _Lane:
    """What is known of batches of one size: how fast they are either way, and which way they go."""

    plain: _Speed = field(default_factory=_Speed)
    drafted: _Speed = field(default_factory=_Speed)
    since_plain: int = 0
    plain_every: int = FIRST_PLAIN
    off: bool = False
    wait: int = FIRST_WAIT
    left: int = 0  # plain rounds until the next try
    tries: int = 0

    @property
    def knows_drafted(self) -> bool:
        return self.drafted.num_rounds >= ENOUGH_DRAFTED and self.drafted.seconds > 0

    @property
    def knows_plain(self) -> bool:
        return self.plain.num_rounds >= ENOUGH_PLAIN and self.plain.seconds > 0


@dataclass(slots=True, kw_only=True)
class _Scale:
    """Measured over predicted seconds."""

    value: float = 1.0
    known: bool = False

    def add(self, measured: float, predicted: float) -> None:
        if measured <= 0 or predicted <= 0:
            return
        ratio = measured / predicted
        self.value = self.value + SMOOTHING * (ratio - self.value) if self.known else ratio
        self.known = True


class AutoShaper:
    """Chooses a shape a round and batch size, or none where plain decoding is faster; then it tries again at times.

    caps: the largest steps, children and nodes. chains_only: for verifiers of drawn chains. scoring: how the drafter's
    scores start; they are kept calibrated. Keep one to go on learning in a later call.
    """

    def __init__(
        self,
        costs: CostModel,
        *,
        caps: TreeShape = DEFAULT_CAPS,
        chains_only: bool = False,
        scoring: Scoring = DEFAULT_SCORING,
    ) -> None:
        if chains_only:
            caps = TreeShape(num_steps=caps.num_steps, top_k=1, num_nodes=min(caps.num_steps + 1, caps.num_nodes))
        self._costs, self._caps, self._scoring = costs, caps, scoring
        self._tracker, self._num_trees, self._num_rounds = AcceptanceTracker(), 0, 0
        self._lanes: dict[int, _Lane] = {}
        self._budgets: dict[tuple[int, int, int], tuple[int, Budget]] = {}
        self._plain_scale, self._tree_scale, self._draft_scale = _Scale(), _Scale(), _Scale()
        self._usual_extra = 0.0  # nodes beside the root, of a row's verified trees
        self._planned_draft_seconds = 0.0

    @property
    def largest(self) -> DraftPlan:
        return DraftPlan(shape=self._caps, scoring=self._scoring)

    def plan(self, state: RoundState) -> DraftPlan | None:
        self._num_rounds += 1
        budget = self._budget(state)
        if self._goes_plain(self._lanes.setdefault(state.num_rows, _Lane()), state, budget):
            return None
        topology = budget.topology
        shape = topology.shape
        self._planned_draft_seconds = self._draft_seconds(state, shape.num_steps, shape.top_k)
        if state.sampled:
            return DraftPlan(shape=shape, topology=topology, scoring=self._scoring)
        # Which nodes to keep is decided by their values, once they are there: ask for as many as there may be.
        most = 1 + shape.top_k + (shape.num_steps - 1) * shape.top_k**2
        wide = TreeShape(num_steps=shape.num_steps, top_k=shape.top_k, num_nodes=min(self._caps.num_nodes, most))
        return DraftPlan(shape=wide, scoring=self._scoring)

    def prune(self, state: RoundState, trees: Sequence[TokenTree]) -> Sequence[TokenTree]:
        """Keep the nodes, of all rows together, that raise tokens a second; others would cost more than they bring."""
        survivals = [self._survival(tree) for tree in trees]
        # Stable: a node comes after its parent, which survives at least as often.
        ranked = sorted(
            ((p, i, node) for i, row in enumerate(survivals) for node, p in enumerate(row) if node),
            key=lambda one: -one[0],
        )
        # A try must be one: until drafted rounds have been timed, there are drafts in them.
        least = 0 if self._lanes[state.num_rows].knows_drafted else min(len(trees), len(ranked))
        best, kept, tokens = 0.0, 0, float(len(trees))
        for count in range(len(ranked) + 1):
            tokens += ranked[count - 1][0] if count else 0.0
            seconds = self._planned_draft_seconds + self._verify_seconds(state, len(trees) + count)
            if count >= least and tokens / seconds > best:
                best, kept = tokens / seconds, count
        chosen: list[list[int]] = [[0] for _ in trees]
        for _, i, node in ranked[:kept]:
            chosen[i].append(node)
        return [_subtree(tree, sorted(nodes)) for tree, nodes in zip(trees, chosen, strict=True)]

    def observe(self, outcome: RoundOutcome) -> None:
        state, num_nodes = outcome.state, sum(map(len, outcome.trees))
        lane = self._lanes.setdefault(state.num_rows, _Lane())
        predicted = self._costs.verify_seconds(state.num_rows, num_nodes, state.context)
        tokens, seconds = sum(map(len, outcome.paths)), outcome.draft_seconds + outcome.verify_seconds
        if outcome.plan is None:
            self._plain_scale.add(outcome.verify_seconds, predicted)
            lane.plain.add(tokens, seconds)
            return
        shape, extra = outcome.plan.shape, num_nodes / state.num_rows - 1
        self._usual_extra += (SMOOTHING if self._tree_scale.known else 1.0) * (extra - self._usual_extra)
        self._tree_scale.add(outcome.verify_seconds, predicted)
        self._draft_scale.add(
            outcome.draft_seconds, self._costs.draft_seconds(state.num_rows, shape.num_steps, shape.top_k)
        )
        lane.drafted.add(tokens, seconds)
        for tree, path in zip(outcome.trees, outcome.paths, strict=True):
            self._tracker.observe(tree, path)
            self._num_trees += 1
            if self._num_trees % RECALIBRATE_EVERY == 0:
                self._scoring = self._tracker.recalibrated(self._scoring)

    def _goes_plain(self, lane: _Lane, state: RoundState, budget: Budget) -> bool:
        if lane.off:
            lane.left -= 1
            if lane.left >= 0:
                return True
            lane.off, lane.drafted = False, _Speed()  # another try, judged by itself
            lane.tries += 1
        if self._loses(lane, state, budget):
            lane.off, lane.left = True, lane.wait - 1
            lane.wait = min(PATIENCE * lane.wait, LONGEST_WAIT)
            return True
        if lane.knows_drafted:
            lane.wait = FIRST_WAIT
        lane.since_plain += 1
        if lane.since_plain <= lane.plain_every:
            return False
        lane.since_plain, lane.plain_every = 0, min(PATIENCE * lane.plain_every, LONGEST_PLAIN)
        return True

    def _loses(self, lane: _Lane, state: RoundState, budget: Budget) -> bool:
        if lane.knows_plain:
            plain = lane.plain.tokens_per_second
        else:
            scale = self._plain_scale if self._plain_scale.known else self._tree_scale
            seconds = self._costs.verify_seconds(state.num_rows, state.num_rows, state.context)
            plain = state.num_rows / (scale.value * seconds)
        if lane.knows_drafted:
            return lane.drafted.tokens_per_second < plain
        if lane.drafted.seconds - lane.drafted.tokens / plain > LARGEST_LOSS * state.num_rows / plain:
            return True
        # Predictions decide the first time only: what they leave out would keep speculation off for ever.
        return lane.tries == 0 and lane.drafted.num_rounds == 0 and budget.tokens_per_second < plain

    def _budget(self, state: RoundState) -> Budget:
        steps = min(self._caps.num_steps, state.max_depth)
        key = (state.num_rows, state.context.bit_length(), steps)
        known = self._budgets.get(key)
        if known is not None and self._num_rounds < known[0]:
            return known[1]
        rates = {
            (depth, rank): self._tracker.acceptance(depth, rank)
            for depth in range(1, steps + 1)
            for rank in range(self._caps.top_k)
        }
        budget = best_budget(
            lambda depth, rank: rates[depth, rank],
            lambda shape: (
                self._draft_seconds(state, shape.num_steps, shape.top_k)
                + self._verify_seconds(state, state.num_rows * shape.num_nodes)
            ),
            TreeShape(num_steps=steps, top_k=self._caps.top_k, num_nodes=self._caps.num_nodes),
            state.num_rows,
        )
        self._budgets[key] = (self._num_rounds + REFRESH_EVERY, budget)
        return budget

    def _verify_seconds(self, state: RoundState, num_nodes: int) -> float:
        scale = self._tree_scale.value if self._tree_scale.known else self._plain_scale.value
        if self._tree_scale.known and self._plain_scale.known:
            # Between plain rounds and trees of the usual size, so that a wrong price of nodes is put right too.
            share = (num_nodes / state.num_rows - 1) / max(self._usual_extra, 1e-9)
            scale = self._plain_scale.value + min(share, 1.0) * (scale - self._plain_scale.value)
        return scale * self._costs.verify_seconds(state.num_rows, num_nodes, state.context)

    def _draft_seconds(self, state: RoundState, num_steps: int, top_k: int) -> float:
        return self._draft_scale.value * self._costs.draft_seconds(state.num_rows, num_steps, top_k)

    def _survival(self, tree: TokenTree) -> list[float]:
        """Of each node: its drafter's estimate, or the past acceptance of its depth and rank."""
        own = tree.survival if isinstance(tree, ScoredTree) else None
        depths, survival = tree.depths, [1.0]
        num_children = [0] * len(tree)
        for node, parent in enumerate(tree.parents[1:], start=1):
            if own is not None:
                survival.append(min(own[node], survival[parent]))
            else:
                rate = self._tracker.acceptance(depths[node], num_children[parent])
                survival.append(survival[parent] * rate)
            num_children[parent] += 1
        return survival


def _subtree(tree: TokenTree, kept: Sequence[int]) -> TokenTree:
    """The tree of these nodes, which hold their own ancestors."""
    if len(kept) == len(tree):
        return tree
    new = {-1: -1} | {old: place for place, old in enumerate(kept)}
    tokens, parents = [tree.tokens[node] for node in kept], [new[tree.parents[node]] for node in kept]
    if isinstance(tree, ScoredTree):
        return ScoredTree(tokens=tokens, parents=parents, survival=[tree.survival[node] for node in kept])
    return TokenTree(tokens=tokens, parents=parents)
