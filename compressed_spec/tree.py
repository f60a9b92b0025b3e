"""Trees of candidate tokens, and the shapes that users name (`sN_kK_dD`)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTree:
    """Candidate continuations of one sequence; node 0 is the root: the newest token, not yet processed.

    `tokens[i]` is a token id and `parents[i]` the node before it; parents precede children and `parents[0] == -1`.
    Raises ValueError where that does not hold.
    """

    tokens: Sequence[int]
    parents: Sequence[int]

    def __post_init__(self) -> None:
        tokens, parents = tuple(map(int, self.tokens)), tuple(map(int, self.parents))
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "parents", parents)
        if not tokens or len(tokens) != len(parents):
            raise ValueError(
                f"A tree needs one parent a token and at least a root, got {len(tokens)} tokens and "
                f"{len(parents)} parents."
            )
        if parents[0] != -1 or any(not 0 <= parent < node for node, parent in enumerate(parents[1:], start=1)):
            raise ValueError(
                f"Tree parents must be -1 for the root and an earlier node for every other, got {list(parents)}."
            )

    @classmethod
    def chain(cls, tokens: Sequence[int]) -> "TokenTree":
        """The tree without branches: each token follows the one before."""
        return cls(tokens=tokens, parents=range(-1, len(tokens) - 1))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def depths(self) -> list[int]:
        """Distance of each node from the root."""
        depths = [0] * len(self.parents)
        for node, parent in enumerate(self.parents[1:], start=1):
            depths[node] = depths[parent] + 1
        return depths

    def children(self, node: int) -> list[int]:
        """Nodes whose parent is `node`, in order."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def path_to(self, node: int) -> list[int]:
        """Node ids from the root to `node`, both included."""
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        return path[::-1]

    def check_path(self, path: Sequence[int]) -> None:
        """Raise ValueError unless `path` starts at the root and goes from parent to child (it may be empty)."""
        previous = -1
        for node in path:
            if not 0 <= node < len(self.parents) or self.parents[node] != previous:
                raise ValueError(f"Path {list(path)} does not run from the root along the tree {list(self.parents)}.")
            previous = node


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeShape:
    """`sN_kK_dD`: N draft steps, K children a node, D nodes verified with the root (SGLang's three numbers)."""

    num_steps: int
    top_k: int
    num_nodes: int

    @property
    def num_draft_nodes(self) -> int:
        """Nodes that a stepping draft head processes: the root and K a further step."""
        return 1 + (self.num_steps - 1) * self.top_k

    def __str__(self) -> str:
        return f"s{self.num_steps}_k{self.top_k}_d{self.num_nodes}"


def parse_tree(text: str) -> TreeShape | None:
    """The shape that a user named, None for "off".

    Raises ValueError for an unknown string or a shape that no tree has: N or K below 1, a chain (K = 1) with
    D != N + 1, or D - 1 above the K + (N - 1) K^2 candidates.
    """
    if text == "off":
        return None
    match = re.fullmatch(r"s(\d+)_k(\d+)_d(\d+)", text)
    if match is None:
        raise ValueError(
            f"Unknown tree {text!r}: use 'off', 'auto', 'dynamic', static:FILE, optimal_dD:FILE, or sN_kK_dD (draft "
            "steps, children a node, nodes verified), such as 's3_k2_d6' for a tree or 's3_k1_d4' for a chain."
        )
    steps, top_k, nodes = map(int, match.groups())
    if steps < 1 or top_k < 1:
        raise ValueError(
            f"Tree {text!r} needs at least one draft step and one child a node: raise s and k to 1 or more."
        )
    most = 1 + top_k + (steps - 1) * top_k**2
    if top_k == 1 and nodes != steps + 1:
        raise ValueError(f"Tree {text!r} is a chain of {steps} drafts: write s{steps}_k1_d{steps + 1}.")
    if not 2 <= nodes <= most:
        raise ValueError(
            f"Tree {text!r} asks for {nodes} nodes, but {steps} steps of {top_k} children give between 2 and {most}: "
            "change d."
        )
    return TreeShape(num_steps=steps, top_k=top_k, num_nodes=nodes)
