"""Trees drawn from a draft head's law, for verifiers that compare the law with the target's.

Whether a node is verified must not depend on its own value, or the output's law is no longer the target's. So the
topology is fixed by the shape before anything is drawn, and siblings are drawn without replacement.

B = batch rows, F = nodes of a level, V = vocabulary
"""

from collections.abc import Sequence

import numpy as np
import torch

from compressed_spec.drafting.base import DraftPlan, DraftRequest
from compressed_spec.drafting.steps import Steps
from compressed_spec.topology import Topology
from compressed_spec.tree import TokenTree
from compressed_spec.verifying import Coins, DraftTree, Proposal, sampled_children

RANK_DECAY = 0.4  # how much rarer a node's next child is taken to be accepted, whatever its value


def fixed_topology(plan: DraftPlan | DraftRequest, num_steps: int | None = None) -> Topology:
    """The topology asked for; without one, the D - 1 best positions of the shape if acceptance fell with rank alone.

    As in the head's best-first trees, a level has at most K nodes with children, and these at most K each. num_steps:
    levels, if fewer than the plan's.
    """
    shape = plan.shape
    num_steps = shape.num_steps if num_steps is None else num_steps
    if plan.topology is not None:
        return plan.topology.limited(num_steps)
    parents, scores, depths = [-1], [1.0], [0]
    newest = [0]
    for depth in range(1, num_steps + 1):
        level = []
        for parent in sorted(newest, key=lambda node: -scores[node])[: shape.top_k]:
            for rank in range(shape.top_k):
                level.append(len(parents))
                parents.append(parent)
                scores.append(scores[parent] * (1 - RANK_DECAY) * RANK_DECAY**rank)
                depths.append(depth)
        newest = level
    kept = sorted(sorted(range(1, len(parents)), key=lambda node: -scores[node])[: shape.num_nodes - 1])
    node_of = {0: 0} | {old: new for new, old in enumerate(kept, start=1)}
    return Topology(parents=(-1, *(node_of[parents[old]] for old in kept)))


def sampled_trees(steps: Steps, request: DraftRequest, coins: Sequence[Coins], *, num_steps: int) -> list[DraftTree]:
    """One tree a row, at most `num_steps` deep, drawn with the row's coins at its temperature (1 for greedy rows)."""
    topology = fixed_topology(request, num_steps)
    parents, depths = topology.parents, topology.depths
    drawn = [_Drawn(root, parents, depths, cap) for root, cap in zip(request.roots, request.max_depths, strict=True)]
    laws, expanded = steps.root(), [[0] for _ in drawn]
    for depth in range(max(depths)):
        for i, row in enumerate(drawn):
            for slot, node in enumerate(expanded[i]):
                row.draw(node, laws.log_q_BFV[i, slot], coins[i])
        upcoming = [row.expandable(depth + 1) for row in drawn]
        width = max(map(len, upcoming))
        if width == 0:
            break
        # Rows with fewer nodes to expand repeat one of theirs (the root's at the least); nothing is drawn from it.
        tokens, slots = [], []
        for row, now, nodes in zip(drawn, expanded, upcoming, strict=True):
            parent_slots = [now.index(row.parents[node]) for node in nodes] + [0] * (width - len(nodes))
            tokens.append([row.tokens[node] for node in nodes] + [row.tokens[0]] * (width - len(nodes)))
            slots.append(parent_slots)
        laws = steps.descend(np.asarray(tokens), np.asarray(slots))
        expanded = upcoming
    return [row.tree() for row in drawn]


class _Drawn:
    """One row's tree while it is drawn; `slot_of` maps its nodes to the topology's."""

    def __init__(self, root: int, topology: Sequence[int], depths: Sequence[int], max_depth: int) -> None:
        self.tokens, self.parents = [root], [-1]
        self._topology, self._depths, self._max_depth = topology, depths, max_depth
        self._places = [0]
        self._laws: dict[int, torch.Tensor] = {}

    def _children(self, place: int) -> list[int]:
        if self._depths[place] >= self._max_depth:
            return []
        return [child for child, parent in enumerate(self._topology) if parent == place]

    def expandable(self, depth: int) -> list[int]:
        """Nodes at this depth that the topology gives children."""
        return [
            node for node, place in enumerate(self._places) if self._depths[place] == depth and self._children(place)
        ]

    def draw(self, node: int, log_q_V: torch.Tensor, coins: Coins) -> None:
        """Give a node its children, drawn from its law."""
        places = self._children(self._places[node])
        if not places:
            return
        self._laws[node] = log_q_V
        # A law with fewer tokens than places leaves the last places empty, with all below them.
        tokens = sampled_children(log_q_V, len(places), False, coins)
        for token, place in zip(tokens, places, strict=False):
            self.tokens.append(token)
            self.parents.append(node)
            self._places.append(place)

    def tree(self) -> DraftTree:
        tree = TokenTree(tokens=self.tokens, parents=self.parents)
        blank = torch.full_like(next(iter(self._laws.values())), float("-inf")) if self._laws else None
        if blank is None:
            return DraftTree(tree=tree, proposal=Proposal.DETERMINISTIC, fixed_topology=True)
        return DraftTree(
            tree=tree,
            proposal=Proposal.SAMPLED,
            fixed_topology=True,
            log_q=torch.stack([self._laws.get(node, blank) for node in range(len(tree))]),
            replacement=False,
        )
