"""The topology of a given number of nodes that is accepted the longest, by measured acceptance.

Sequoia's objective and dynamic programme (arXiv 2402.12374, section 4.1), with acceptance by depth as well as rank.
"""

from collections.abc import Sequence
from functools import cache

from compressed_spec.topology import Topology

Acceptance = Sequence[Sequence[float]]


def expected_length(topology: Topology, acceptance: Acceptance) -> float:
    """Tokens that a round emits on average: the root's bonus, and each node with the probability of its path."""
    depths, ranks = topology.depths, topology.ranks
    survival = [1.0]
    for node in range(1, len(topology)):
        survival.append(survival[topology.parents[node]] * acceptance[depths[node] - 1][ranks[node]])
    return sum(survival)


def optimal_topology(acceptance: Acceptance, num_nodes: int) -> Topology:
    """The topology of at most `num_nodes` nodes, root counted, with the largest `expected_length`; ties: fewer nodes.

    acceptance: one row a depth (1: the root's children), one entry a rank: how often the target's token is the child of
    that rank, once its text has reached the parent. No node lies deeper, or has more siblings, than the table tells.
    Raises ValueError for an empty table, an entry outside 0 .. 1, or fewer than 2 nodes.
    """
    if num_nodes < 2:
        raise ValueError(f"A draft tree needs at least 2 nodes, got {num_nodes}.")
    if not acceptance or not all(acceptance):
        raise ValueError("An acceptance table needs at least one depth, and at least one rank at each: measure more.")
    if not all(0 <= p <= 1 for row in acceptance for p in row):
        raise ValueError("Acceptance rates must lie between 0 and 1.")

    @cache
    def subtree(depth: int, nodes: int) -> float:
        """Most accepted below and at a node that is reached, with so many nodes, itself counted."""
        return 1.0 + children(depth, 0, nodes - 1)

    @cache
    def children(depth: int, rank: int, nodes: int) -> float:
        """Most accepted in the children from this rank on, of a node at `depth`, with at most so many nodes."""
        return max((value for value, _ in splits(depth, rank, nodes)), default=0.0)

    def splits(depth: int, rank: int, nodes: int) -> list[tuple[float, int]]:
        """What giving 0, 1, 2, ... nodes to the child of this rank is worth. Without it, there are no later ones."""
        if depth == len(acceptance) or rank == len(acceptance[depth]):
            return [(0.0, 0)]
        rate = acceptance[depth][rank]
        return [(0.0, 0)] + [
            (rate * subtree(depth + 1, own) + children(depth, rank + 1, nodes - own), own)
            for own in range(1, nodes + 1)
        ]

    parents = [-1]

    def build(node: int, depth: int, nodes: int) -> None:
        rank = 0
        while True:
            _, own = max(splits(depth, rank, nodes), key=lambda split: (split[0], -split[1]))
            if own == 0:
                return
            parents.append(node)
            build(len(parents) - 1, depth + 1, own - 1)
            nodes, rank = nodes - own, rank + 1

    build(0, 0, num_nodes - 1)
    if len(parents) == 1:
        raise ValueError("Nothing was accepted at depth 1, so no tree is worth its nodes: use tree='off'.")
    return Topology.ordered(parents)
