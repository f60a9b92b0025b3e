"""The form of a draft tree without its tokens: a node is its parent's first, second, ... best child."""

from collections.abc import Sequence
from dataclasses import dataclass

from compressed_spec.tree import TokenTree, TreeShape


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Positions of a tree by child rank; node 0 is the root.

    `parents` as in TokenTree, and level by level: the i-th node with parent p is p's child of rank i. Raises ValueError
    for anything else.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        depths = self.depths
        if sorted(depths) != depths:
            raise ValueError(f"A topology lists its nodes level by level, got depths {depths}.")

    @classmethod
    def ordered(cls, parents: Sequence[int]) -> "Topology":
        """The topology of any parents-first list, its nodes renumbered level by level; siblings keep their order.

        Raises ValueError if `parents` is not such a list.
        """
        depths = TokenTree(tokens=[0] * len(parents), parents=parents).depths
        order = sorted(range(len(parents)), key=lambda node: depths[node])
        new = {old: place for place, old in enumerate(order)}
        return cls(parents=tuple(-1 if old == 0 else new[parents[old]] for old in order))

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> "Topology":
        """From each node's child ranks on the way to it, such as [[0], [1], [0, 0]]; the root is not listed.

        Raises ValueError for a negative rank, a path given twice, or one whose parent or better sibling is missing.
        """
        known = {tuple(path) for path in paths}
        if len(known) != len(paths) or () in known:
            raise ValueError("Each path of ranks must be given once, and the root's empty one not at all.")
        node_of: dict[tuple[int, ...], int] = {(): 0}
        parents = [-1]
        for path in sorted(known, key=lambda path: (len(path), path)):
            before = (*path[:-1], path[-1] - 1)
            if path[:-1] not in node_of or path[-1] < 0 or (path[-1] > 0 and before not in node_of):
                raise ValueError(
                    f"Path {list(path)} needs its parent and every better-ranked sibling among the paths: add them."
                )
            node_of[path] = len(parents)
            parents.append(node_of[path[:-1]])
        return cls.ordered(parents)

    def __len__(self) -> int:
        return len(self.parents)

    @property
    def depths(self) -> list[int]:
        """Distance of each node from the root."""
        return TokenTree(tokens=[0] * len(self.parents), parents=self.parents).depths

    def limited(self, num_steps: int) -> "Topology":
        """Its nodes down to this depth."""
        return Topology(parents=self.parents[: sum(depth <= num_steps for depth in self.depths)])

    @property
    def ranks(self) -> list[int]:
        """Each node's place among its siblings, 0 for the root."""
        return [self.parents[:node].count(parent) if node else 0 for node, parent in enumerate(self.parents)]

    @property
    def expanded(self) -> list[list[int]]:
        """Nodes that have children, one list a depth, in order."""
        depths, inner = self.depths, sorted(set(self.parents) - {-1})
        return [[node for node in inner if depths[node] == depth] for depth in range(max(depths))]

    @property
    def shape(self) -> TreeShape:
        """Steps, most children of a node, and nodes."""
        most = max((self.parents.count(node) for node in range(len(self))), default=0)
        return TreeShape(num_steps=max(self.depths), top_k=most, num_nodes=len(self))


def tree_around(root: int, future: Sequence[int], shape: TreeShape, vocab_size: int) -> TokenTree:
    """The tokens of `future` as a chain of at most `num_steps`, each after `top_k - 1` siblings of other tokens.

    Where `num_nodes` do not reach for all siblings of a token, it comes alone or with fewer. Its node is always the
    last of them.
    """
    tokens, parents, tip = [root], [-1], 0
    for token in future[: shape.num_steps]:
        siblings = [
            (token + i) % vocab_size for i in range(min(shape.top_k, shape.num_nodes - len(tokens)) - 1, -1, -1)
        ]
        if not siblings:
            break
        tokens += siblings
        parents += [tip] * len(siblings)
        tip = len(tokens) - 1
    return TokenTree(tokens=tokens, parents=parents)
