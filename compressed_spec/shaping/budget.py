"""How many nodes, and how deep: the topology with the most expected tokens a second."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from compressed_spec.topology import Topology
from compressed_spec.tree import TreeShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A topology, the tokens a round that it is expected to emit a row, and those of the batch a second."""

    topology: Topology
    tokens: float
    tokens_per_second: float


def best_budget(
    acceptance: Callable[[int, int], float], seconds: Callable[[TreeShape], float], caps: TreeShape, num_rows: int
) -> Budget:
    """The best topology of at least one draft node within the caps, the same for each of `num_rows` rows.

    As in a head's best-first trees, a level has at most K nodes with children, and these at most K each.
    acceptance(depth, rank): from depth 1 and rank 0. seconds(shape): of a round of such trees, drafting included. For
    each depth limit, nodes come in descending order of survival, and every prefix of that order is weighed: a step of
    the drafter makes costs jump, so the first node that does not pay need not be the last that does.
    """
    best: Budget | None = None
    for limit in range(1, caps.num_steps + 1):
        parents, survival, depths = [-1], [1.0], [0]
        num_children, num_expanded = [0], [0] * limit
        tokens, width = 1.0, 0
        heap = [(-acceptance(1, 0), 1, 0, 0)]
        while heap and len(parents) < caps.num_nodes:
            negative, depth, parent, rank = heapq.heappop(heap)
            if rank == 0:
                if num_expanded[depth - 1] == caps.top_k:
                    continue
                num_expanded[depth - 1] += 1
            node = len(parents)
            parents.append(parent)
            survival.append(-negative)
            depths.append(depth)
            num_children.append(0)
            num_children[parent] += 1
            width = max(width, num_children[parent])
            tokens -= negative
            if rank + 1 < caps.top_k:
                heapq.heappush(heap, (-survival[parent] * acceptance(depth, rank + 1), depth, parent, rank + 1))
            if depth < limit:
                heapq.heappush(heap, (negative * acceptance(depth + 1, 0), depth + 1, node, 0))
            shape = TreeShape(num_steps=max(depths), top_k=width, num_nodes=len(parents))
            speed = num_rows * tokens / seconds(shape)
            if best is None or speed > best.tokens_per_second:
                best = Budget(topology=Topology.ordered(parents), tokens=tokens, tokens_per_second=speed)
    assert best is not None, "caps allow a draft node"
    return best
