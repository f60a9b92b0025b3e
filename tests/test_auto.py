"""The cost-aware shaper in a world of its own, whose acceptance and seconds are known."""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from compressed_spec import TokenTree
from compressed_spec.drafting import ScoredTree
from compressed_spec.shaping import AutoShaper, CostModel, RoundOutcome, RoundState
from compressed_spec.shaping.budget import best_budget
from compressed_spec.shaping.optimal import expected_length
from compressed_spec.topology import Topology
from compressed_spec.tree import TreeShape

CAPS = TreeShape(num_steps=5, top_k=3, num_nodes=12)
Rates = tuple[float, ...]


def linear_costs(constant: float, per_node: float, per_step: float = 0.0) -> CostModel:
    return CostModel(
        verify=(constant, 0.0, per_node, 0.0, 0.0), draft=(0.0, per_step, 0.0), num_experts=lambda nodes: 0.0
    )


@dataclass(slots=True, kw_only=True)
class Result:
    tokens: int = 0
    seconds: float = 0.0
    drafted: int = 0
    plain: int = 0

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


@dataclass(slots=True, kw_only=True)
class World:
    """Drafts trees of ranks; the child of rank r is the target's with chance `rates[r]`, at any depth.

    seconds(num_rows, num_nodes) of a verify, per_step of a draft step.
    """

    rates: Rates
    seconds: Callable[[int, int], float]
    per_step: float
    seed: int = 0

    def tree(self, shape: TreeShape) -> TokenTree:
        """The most probable nodes within the caps."""
        nodes: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
        kept: list[tuple[tuple[int, ...], float]] = []
        while nodes and len(kept) < shape.num_nodes:
            nodes.sort(key=lambda one: (-one[1], len(one[0]), one[0]))
            path, p = nodes.pop(0)
            kept.append((path, p))
            if len(path) < shape.num_steps:
                nodes += [((*path, r), p * rate) for r, rate in enumerate(self.rates[: shape.top_k]) if rate]
        paths = sorted((path for path, _ in kept), key=lambda path: (len(path), path))
        return TokenTree(
            tokens=[0, *(path[-1] for path in paths[1:])],
            parents=[-1, *(paths.index(path[:-1]) for path in paths[1:])],
        )

    def walk(self, tree: TokenTree, rng: random.Random) -> tuple[int, ...]:
        path = [0]
        while True:
            u = rng.random()
            for child in tree.children(path[-1]):
                if u < self.rates[tree.tokens[child]]:
                    path.append(child)
                    break
                u -= self.rates[tree.tokens[child]]
            else:
                return tuple(path)

    def run(self, shaper: AutoShaper, rounds: int, num_rows: int = 1) -> Result:
        result, rng = Result(), random.Random(self.seed)
        state = RoundState(num_rows=num_rows, context=100, max_depth=50, sampled=False)
        for _ in range(rounds):
            plan = shaper.plan(state)
            trees = [TokenTree(tokens=[0], parents=[-1])] * num_rows
            draft_seconds = 0.0
            if plan is not None:
                trees = list(shaper.prune(state, [self.tree(plan.shape)] * num_rows))
                draft_seconds = self.per_step * plan.shape.num_steps
            paths = tuple(self.walk(tree, rng) for tree in trees)
            verify_seconds = self.seconds(num_rows, sum(map(len, trees)))
            shaper.observe(
                RoundOutcome(
                    state=state,
                    plan=plan,
                    trees=tuple(trees),
                    paths=paths,
                    draft_seconds=draft_seconds,
                    verify_seconds=verify_seconds,
                )
            )
            result.tokens += sum(map(len, paths))
            result.seconds += draft_seconds + verify_seconds
            result.drafted += plan is not None
            result.plain += plan is None
        return result

    def plain_speed(self, num_rows: int = 1) -> float:
        return num_rows / self.seconds(num_rows, num_rows)

    def best_fixed_speed(self, num_rows: int = 1) -> float:
        """Of every shape within the caps, by its exact expectation."""
        best = 0.0
        for steps, top_k, nodes in itertools.product(range(1, 6), range(1, 4), range(2, 13)):
            tree = self.tree(TreeShape(num_steps=steps, top_k=top_k, num_nodes=nodes))
            survival = [1.0]
            for node in range(1, len(tree)):
                survival.append(survival[tree.parents[node]] * self.rates[tree.tokens[node]])
            seconds = steps * self.per_step + self.seconds(num_rows, num_rows * len(tree))
            best = max(best, num_rows * sum(survival) / seconds)
        return best


WORLDS = {
    "good and cheap": ((0.8, 0.1, 0.02), 10.0, 0.1, 0.2),
    "fair, nodes cost": ((0.6, 0.2, 0.05), 10.0, 1.0, 0.5),
    "poor but wide": ((0.3, 0.25, 0.2), 10.0, 0.3, 0.3),
    "dear steps": ((0.7, 0.2, 0.05), 10.0, 0.2, 3.0),
}


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize("name", list(WORLDS))
def test_reaches_the_best_fixed_shape(name: str, num_rows: int) -> None:
    rates, constant, per_node, per_step = WORLDS[name]
    world = World(rates=rates, seconds=lambda rows, nodes: constant + per_node * nodes, per_step=per_step)
    shaper = AutoShaper(linear_costs(constant, per_node, per_step), caps=CAPS)
    result = world.run(shaper, 1500, num_rows)
    assert result.speed > 0.95 * world.best_fixed_speed(num_rows)
    assert result.speed > world.plain_speed(num_rows)


@pytest.mark.parametrize(
    ("rates", "per_node"),
    [((0.0, 0.0, 0.0), 0.1), ((0.05, 0.02, 0.0), 2.0), ((0.5, 0.2, 0.05), 10.0)],
    ids=["never right", "seldom right", "nodes too dear"],
)
def test_turns_itself_off_and_tries_again(rates: Rates, per_node: float) -> None:
    world = World(rates=rates, seconds=lambda rows, nodes: 10.0 + per_node * nodes, per_step=2.0)
    result = world.run(AutoShaper(linear_costs(10.0, per_node, 2.0), caps=CAPS), 3000)
    assert result.speed > 0.97 * world.plain_speed()
    assert 0 < result.drafted < 300


def test_measured_rounds_overrule_a_wrong_profile() -> None:
    """The profile takes nodes to be free, and they are not; or dear, and they are free."""
    dear = World(rates=(0.5, 0.2, 0.1), seconds=lambda rows, nodes: 10.0 * nodes, per_step=0.1)
    result = dear.run(AutoShaper(linear_costs(10.0, 1e-6, 0.1), caps=CAPS), 3000)
    assert result.speed > 0.95 * dear.plain_speed()
    free = World(rates=(0.8, 0.1, 0.05), seconds=lambda rows, nodes: 10.0, per_step=0.1)
    result = free.run(AutoShaper(linear_costs(0.1, 10.0, 0.1), caps=CAPS), 3000)
    assert result.speed > 1.3 * free.plain_speed()


def test_comes_back_when_drafts_get_better() -> None:
    costs = linear_costs(10.0, 0.5, 0.5)
    shaper = AutoShaper(costs, caps=CAPS)
    bad = World(rates=(0.0, 0.0, 0.0), seconds=lambda rows, nodes: 10.0 + 0.5 * nodes, per_step=0.5)
    assert bad.run(shaper, 300).drafted < 60
    good = World(rates=(0.8, 0.1, 0.05), seconds=bad.seconds, per_step=0.5)
    good.run(shaper, 600)  # at most one longest wait
    assert good.run(shaper, 600).speed > 0.9 * good.best_fixed_speed()
    bad.run(shaper, 200)
    assert bad.run(shaper, 600).speed > 0.9 * bad.plain_speed()


def test_shapes_follow_the_batch() -> None:
    """Nodes are free up to 16 of them and dear beyond: one row speculates, sixteen do not."""

    def seconds(rows: int, nodes: int) -> float:
        return 10.0 + 2.0 * max(0, nodes - 16)

    world = World(rates=(0.6, 0.2, 0.1), seconds=seconds, per_step=0.1)
    shaper = AutoShaper(linear_costs(2.0, 1.0, 0.1), caps=CAPS)
    alone, together = world.run(shaper, 1000), world.run(shaper, 1000, num_rows=16)
    assert alone.plain < 100
    assert together.drafted < 100
    assert alone.speed > 1.5 * world.plain_speed()
    assert together.speed > 0.95 * world.plain_speed(16)
    assert world.run(shaper, 200).plain < 20  # sixteen rows have taught one row nothing wrong


def scored(*edges: tuple[int, float]) -> ScoredTree:
    """A tree from (parent, chance) of each node after the root."""
    survival = [1.0]
    for parent, chance in edges:
        survival.append(survival[parent] * chance)
    return ScoredTree(tokens=range(len(survival)), parents=[-1, *(parent for parent, _ in edges)], survival=survival)


def test_pruning_equals_brute_force_over_the_batch() -> None:
    rng = random.Random(5)
    state = RoundState(num_rows=2, context=10, max_depth=9, sampled=False)
    for _ in range(40):
        trees = [
            scored((0, rng.random()), (0, rng.random() / 2), (1, rng.random()), (2, rng.random())) for _ in range(2)
        ]
        costs = linear_costs(rng.uniform(1, 20), rng.uniform(0.1, 3), 0.5)
        shaper = AutoShaper(costs, caps=TreeShape(num_steps=1, top_k=2, num_nodes=5))
        plan = shaper.plan(state)
        if plan is None:
            continue
        pruned = shaper.prune(state, trees)

        def speed(kept: list[TokenTree] | list[ScoredTree], costs: CostModel = costs) -> float:
            seconds = costs.verify_seconds(2, sum(map(len, kept)), 10) + costs.draft_seconds(2, 1, 2)
            return sum(sum(t.survival) for t in kept if isinstance(t, ScoredTree)) / seconds

        options = []
        for tree in trees:
            closed = []
            for nodes in itertools.product((False, True), repeat=4):
                chosen = [0, *(n for n, kept in enumerate(nodes, start=1) if kept)]
                if all(tree.parents[n] in chosen for n in chosen[1:]):
                    closed.append(
                        ScoredTree(
                            tokens=[tree.tokens[n] for n in chosen],
                            parents=[-1, *(chosen.index(tree.parents[n]) for n in chosen[1:])],
                            survival=[tree.survival[n] for n in chosen],
                        )
                    )
            options.append(closed)
        best = max(speed([a, b]) for a, b in itertools.product(*options))
        if plan.shape.top_k == 2:
            assert speed(list(pruned)) == pytest.approx(best)
        for kept, whole in zip(pruned, trees, strict=True):
            assert all(kept.path_to(n)[0] == 0 for n in range(len(kept)))
            assert set(kept.tokens) <= set(whole.tokens)


def test_pruning_bears_survivals_that_rise() -> None:
    """A user's drafter may claim more for a child than for its parent."""
    state = RoundState(num_rows=1, context=10, max_depth=9, sampled=False)
    shaper = AutoShaper(linear_costs(1.0, 0.1), caps=CAPS)
    assert shaper.plan(state) is not None
    odd = ScoredTree(tokens=[0, 1, 2], parents=[-1, 0, 1], survival=[1.0, 0.01, 0.99])
    (kept,) = shaper.prune(state, [odd])
    assert kept.tokens in ((0,), (0, 1, 2), (0, 1))


def test_sampled_rounds_get_a_topology_beforehand() -> None:
    """Nothing that is drawn in a round may decide its topology: the plan has it before, and it has no values."""
    state = RoundState(num_rows=1, context=10, max_depth=9, sampled=True)
    shaper = AutoShaper(linear_costs(10.0, 0.1, 0.1), caps=CAPS)
    plan = shaper.plan(state)
    assert plan is not None
    assert plan.topology is not None
    assert plan.shape == plan.topology.shape
    chain = AutoShaper(linear_costs(10.0, 0.01, 0.01), caps=CAPS, chains_only=True).plan(state)
    assert chain is not None
    assert chain.topology is not None
    assert chain.topology.parents == tuple(range(-1, len(chain.topology) - 1))
    assert len(chain.topology) > 2


def test_depth_ends_with_the_text() -> None:
    shaper = AutoShaper(linear_costs(10.0, 0.01), caps=CAPS)
    plan = shaper.plan(RoundState(num_rows=1, context=10, max_depth=2, sampled=False))
    assert plan is not None
    assert plan.shape.num_steps <= 2


@pytest.mark.parametrize("per_node", [0.0, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("per_step", [0.0, 1.5])
def test_budget_is_the_best_of_all_small_topologies(per_node: float, per_step: float) -> None:
    table = [[0.7, 0.2], [0.6, 0.15], [0.4, 0.3]]

    def seconds(shape: TreeShape) -> float:
        return 10.0 + per_node * shape.num_nodes + per_step * shape.num_steps

    caps = TreeShape(num_steps=3, top_k=2, num_nodes=6)
    budget = best_budget(lambda depth, rank: table[depth - 1][rank], seconds, caps, 2)
    paths = [(), *(path for n in (1, 2, 3) for path in itertools.product((0, 1), repeat=n))]
    best = 0.0
    for count in range(1, 6):
        for chosen in itertools.combinations(paths[1:], count):
            if all(p[:-1] in ((), *chosen) and (p[-1] == 0 or (*p[:-1], 0) in chosen) for p in chosen):
                topology = Topology.from_paths(chosen)
                best = max(best, 2 * expected_length(topology, table) / seconds(topology.shape))
    assert budget.tokens_per_second == pytest.approx(best)
    assert budget.tokens == pytest.approx(expected_length(budget.topology, table))
