"""What every verifier takes and gives.

Shape suffixes: N nodes of one tree, V vocabulary.

A verifier reads a tree of drafts and the target's law at its nodes, and says which path is accepted and which token
follows it, so that the emitted tokens have the target's law. All chance comes from `Coins`: a verifier states a
probability or weights and is told the outcome. That keeps the rules free of random numbers, and lets a proof walk
every outcome of the very code that runs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import torch
from torch import Tensor

from compressed_spec.tree import TokenTree


class Proposal(StrEnum):
    """How a tree's tokens were chosen."""

    DETERMINISTIC = "deterministic"  # a function of the tokens before: top-k, n-gram, suffix
    COUPLED = "coupled"  # top of log q + g, with the noise g that the target uses
    SAMPLED = "sampled"  # drawn from q with coins of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree:
    """A tree of drafts and what a verifier must know of its making.

    * fixed_topology: no node was kept or dropped because of the value of its own token.
    * log_q: [N, V], any float dtype; row n is the log law that node n's children were drawn from, in node order (the
      first child's law, where siblings are drawn without replacement). Rows of leaves are not read. None where the
      drafts have no law.
    * replacement: siblings were drawn independently (True) or without replacement (False); None where they were not
      drawn.

    Raises ValueError if log_q has not one row a node, or sampled drafts leave out `log_q` or `replacement`.
    """

    tree: TokenTree
    proposal: Proposal
    fixed_topology: bool
    log_q: Tensor | None = None
    replacement: bool | None = None

    def __post_init__(self) -> None:
        if self.log_q is not None and (self.log_q.dim() != 2 or self.log_q.shape[0] != len(self.tree)):
            raise ValueError(
                f"log_q must have one row for each of {len(self.tree)} nodes, got {list(self.log_q.shape)}."
            )
        if self.proposal is Proposal.SAMPLED and (self.log_q is None or self.replacement is None):
            raise ValueError("Sampled drafts must come with log_q, the law that drew them, and with replacement.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """Accepted node ids, the root first, and the correction or bonus token that follows the last of them."""

    path: tuple[int, ...]
    next_token: int


class Coins(Protocol):
    """The source of chance of one draft or one verification; calls are independent of each other."""

    def accept(self, probability: float) -> bool:
        """True with this probability: never at 0, always at 1."""

    def choose(self, weights_V: Tensor) -> int:
        """An index drawn in proportion to non-negative weights, of which one at least is positive; never one of 0."""

    def coupled(self, log_p_V: Tensor, depth: int) -> int:
        """argmax(log p + g), with the Gumbel noise g of the token after a node at this depth (0 at the root)."""


class Verifier(Protocol):
    """A rule that turns drafts into tokens of the target's law."""

    @property
    def name(self) -> str: ...

    def check(self, draft: DraftTree) -> None:
        """Raise ValueError, with the reason, for a tree on which this rule would not be lossless."""

    def verify(self, draft: DraftTree, log_p_NV: Tensor, coins: Coins) -> Acceptance:
        """Accept a path. `log_p_NV`: float [N, V], the target's log law after each node, -inf for excluded tokens."""


def descend(tree: TokenTree, pick: Callable[[int, int], int]) -> Acceptance:
    """Walk from the root: at each node (id, depth) the target picks a token; follow it while it is drafted."""
    path = [0]
    while True:
        token = pick(path[-1], len(path) - 1)
        child = next((c for c in tree.children(path[-1]) if tree.tokens[c] == token), None)
        if child is None:
            return Acceptance(path=tuple(path), next_token=token)
        path.append(child)


def walk(tree: TokenTree, chosen_tokens: Sequence[int]) -> Acceptance:
    """The path that the target's own tokens, one a node (`target_tokens(...).tolist()`), take through the tree."""
    assert len(chosen_tokens) == len(tree), "one chosen token a node"
    return descend(tree, lambda node, depth: chosen_tokens[node])


def law(log_p_V: Tensor) -> Tensor:
    """Probabilities, float64 [V], summing to 1 whatever the precision of their logarithms."""
    return torch.softmax(log_p_V.to(torch.float64), dim=-1)


def check_sampled(draft: DraftTree, name: str, chain: bool) -> None:
    """Raise ValueError unless the draft is what the rules for sampled drafts need."""
    if draft.proposal is not Proposal.SAMPLED:
        raise ValueError(
            f"Verifier {name!r} compares drafts with the law that drew them, and {draft.proposal} drafts have none: "
            "use 'coupled' or 'target'."
        )
    if not draft.fixed_topology:
        raise ValueError(
            f"Verifier {name!r} needs a tree whose shape was fixed before its tokens were drawn, and this one was "
            "pruned by value: use 'coupled' or 'target'."
        )
    if chain and any(parent != node - 1 for node, parent in enumerate(draft.tree.parents)):
        raise ValueError(f"Verifier {name!r} takes chains only and this tree branches: use 'traversal', or k1.")


def draft_probability(q_V: Tensor, token: int, node: int) -> float:
    """q(token), which is positive for a token drawn from q. Raises ValueError if it is not."""
    probability = float(q_V[token])
    if probability <= 0:
        raise ValueError(f"Node {node}'s token {token} has draft probability 0: log_q must be the law that drew it.")
    return probability


def residual(p_V: Tensor, q_V: Tensor, weight: float) -> Tensor:
    """(weight p - q)+, not normalised, float64 [V]."""
    return (weight * p_V - q_V).clamp_(min=0)
