"""Rounds that run without the host: the trees they verify, what they are given, and what they leave.

T = nodes, B = trees, A = longest path, V = vocabulary
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from compressed_spec.layout import StateSpec
from compressed_spec.tree import TokenTree


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTrees:
    """The form of one tree a sequence, flat; a node's slot is its index. All tensors int64.

    parents_T: flat indices, -1 for roots. tree_T: a node's tree. first_B1: first node of each tree, and T. longest:
    nodes of the longest path. most_nodes: of a tree. num_closing: most nodes that close a window at once, by
    compression.
    """

    parents_T: torch.Tensor
    tree_T: torch.Tensor
    slot_T: torch.Tensor
    first_B1: torch.Tensor
    longest: int
    most_nodes: int
    num_closing: Mapping[str, int]

    @classmethod
    def of(cls, parents: Sequence[Sequence[int]], spec: StateSpec, device: torch.device) -> "DeviceTrees":
        """Trees given by their parents, as a TokenTree's."""
        depths = [TokenTree(tokens=[0] * len(tree), parents=tree).depths for tree in parents]
        firsts = [sum(map(len, parents[:i])) for i in range(len(parents) + 1)]
        flat = [-1 if p < 0 else first + p for first, tree in zip(firsts, parents, strict=False) for p in tree]

        def tensor(values: Sequence[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        return cls(
            parents_T=tensor(flat),
            tree_T=tensor([i for i, tree in enumerate(parents) for _ in tree]),
            slot_T=tensor(range(len(flat))),
            first_B1=tensor(firsts),
            longest=max(map(max, depths)) + 1,
            most_nodes=max(map(len, parents)),
            num_closing={
                comp.name: sum(most_closing(tree, comp.ratio) for tree in depths) for comp in spec.compressions
            },
        )


def most_closing(depths: Sequence[int], ratio: int) -> int:
    """Nodes of a tree that close a window of `ratio` at once, at most, whatever the length that it grows from."""
    return max(sum(depth % ratio == phase for depth in depths) for phase in range(ratio))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundInputs:
    """rows_B: batch row that each tree grows from, -1 for a tree that only fills up the batch and changes nothing.
    tokens_T: the trees' tokens. temperature_T (float64), seeds_T: of the token after each node. The others are int64.
    """

    rows_B: torch.Tensor
    tokens_T: torch.Tensor
    temperature_T: torch.Tensor
    seeds_T: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutputs:
    """path_BA: accepted nodes, flat, root first, -1 after the last; token_BA: theirs. count_B: how many. next_token_B:
    what follows them, -1 where the logits had no best token. logits_TV: of every node. Trees that only fill up have no
    path.
    """

    path_BA: torch.Tensor
    token_BA: torch.Tensor
    count_B: torch.Tensor
    next_token_B: torch.Tensor
    logits_TV: torch.Tensor


class DeviceDraft(Protocol):
    """What makes a round's trees on the device, all of one number of nodes. Two of one key make the same of the same.

    key: stands for it where rounds are kept (see `DeviceRounds`). most_trees: for how many there is room.
    """

    @property
    def key(self) -> tuple[int, ...]: ...

    @property
    def num_nodes(self) -> int: ...

    @property
    def most_trees(self) -> int: ...

    def __call__(self, inputs: RoundInputs, lengths_B: torch.Tensor) -> "DraftedTrees":
        """Trees that grow from `inputs`' rows and roots. lengths_B: committed tokens of every batch row."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftedTrees:
    """Their form, and the tokens of all nodes, roots included."""

    trees: DeviceTrees
    tokens_T: torch.Tensor


class DeviceRounds(Protocol):
    """Rounds over one cache, from the drafts to the commit."""

    def follow(self, lengths: Sequence[int]) -> None:
        """The committed lengths of the cache's rows, where others than these rounds have changed them."""
        ...

    def __call__(self, form: Sequence[int] | DeviceDraft, inputs: RoundInputs, most_length: int) -> RoundOutputs:
        """One round of trees that all have these parents, or that are drafted. most_length: no row is longer.

        Nothing has waited for the outputs, which the next round of as many trees of this form overwrites. Raises
        ValueError for more trees than fit.
        """
        ...
