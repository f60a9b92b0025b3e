"""What a drafter is: something that proposes trees and is told what became of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from compressed_spec.cache import Cache
from compressed_spec.drafting.scoring import Scoring
from compressed_spec.topology import Topology
from compressed_spec.tree import TokenTree, TreeShape
from compressed_spec.verifying import Coins, DraftTree


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlan:
    """What trees a round asks for.

    shape: steps, children and nodes; a drafter that does not step reads them as caps. topology: if given, exactly these
    positions (`shape` is then the topology's own). scoring: which nodes are worth more. by_value: the choice of nodes
    is meant to follow their values, so that a drawn tree, whose topology must not, is no substitute.
    """

    shape: TreeShape
    topology: Topology | None = None
    scoring: Scoring = field(default_factory=Scoring)
    by_value: bool = False

    @property
    def num_draft_nodes(self) -> int:
        """Nodes that a stepping draft head processes for one row."""
        return _num_draft_nodes(self.shape, self.topology)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTree(TokenTree):
    """A tree whose drafter says what it expects of it.

    survival: for each node, the estimated probability that the target's text runs through it; 1.0 at the root, and
    never larger than the parent's. Trees of the same nodes are equal whatever it is. Raises ValueError if there is not
    one a node.
    """

    survival: Sequence[float] = field(compare=False)

    def __post_init__(self) -> None:
        TokenTree.__post_init__(self)
        survival = tuple(map(float, self.survival))
        object.__setattr__(self, "survival", survival)
        if len(survival) != len(self.tokens):
            raise ValueError(f"Survival needs one number a node, got {len(survival)} for {len(self.tokens)} nodes.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftRequest:
    """One round's request for trees, one a row.

    rows, roots: batch rows of `cache` and their newest tokens, which become the trees' roots. shape: steps, children
    and nodes asked for; a drafter that does not step reads them as caps. max_depths: how deep each row's tree may
    reach (0 = the root alone). temperatures: of each row's target law, 0 for greedy. noise: None at temperature 0,
    else noise(depth) gives the Gumbel noise `[B, V]` that will decide each row's token at that depth (1: the root's
    children). topology, scoring: see DraftPlan.
    """

    cache: Cache
    rows: tuple[int, ...]
    roots: tuple[int, ...]
    shape: TreeShape
    max_depths: tuple[int, ...]
    temperatures: tuple[float, ...]
    noise: Callable[[int], torch.Tensor] | None
    topology: Topology | None = None
    scoring: Scoring = field(default_factory=Scoring)

    @property
    def num_draft_nodes(self) -> int:
        """Nodes that a stepping draft head processes for one row."""
        return _num_draft_nodes(self.shape, self.topology)


def _num_draft_nodes(shape: TreeShape, topology: Topology | None) -> int:
    return shape.num_draft_nodes if topology is None else sum(map(len, topology.expanded))


@runtime_checkable
class Drafter(Protocol):
    """The interface of every drafter, a user's own included.

    A drafter can only cost speed: what it proposes never changes the output. Invalid ids, repeated siblings and nodes
    beyond the request's caps are dropped, and a sampled tree that has any of these as a whole; an exception costs the
    round its draft, with a warning.
    """

    def start(self, row: int, token_ids: Sequence[int]) -> None:
        """A request begins in a row: its prompt and first token, the newest included."""
        ...

    def propose(self, request: DraftRequest) -> Sequence[TokenTree | DraftTree]:
        """One tree a row of the request (a ScoredTree if it can say); its root is the row's newest token."""
        ...

    def observe(self, row: int, token_ids: Sequence[int]) -> None:
        """Tokens emitted for a row in the round just ended."""
        ...

    def release(self, row: int) -> None:
        """The row's request is over."""
        ...


@runtime_checkable
class SamplingDrafter(Drafter, Protocol):
    """A drafter that can also draw its trees from a law, which the verifiers leviathan, block and traversal need."""

    def propose_sampled(self, request: DraftRequest, coins: Sequence[Coins]) -> Sequence[DraftTree]:
        """One tree a row, drawn with the row's coins; its topology must not depend on the values drawn."""
        ...


class StatelessDrafter:
    """For drafters that draft from the cache alone: of a request they have nothing to remember."""

    def start(self, row: int, token_ids: Sequence[int]) -> None:
        pass

    def observe(self, row: int, token_ids: Sequence[int]) -> None:
        pass

    def release(self, row: int) -> None:
        pass


def usable_tree(tree: TokenTree, root: int, *, vocab_size: int, max_nodes: int, max_depth: int) -> TokenTree:
    """The part of a proposed tree that may be verified: the root alone if it starts from another token.

    Dropped with their descendants: tokens outside the vocabulary, a token that an earlier sibling has, and nodes
    beyond the caps. A ScoredTree stays one.
    """
    if tree.tokens[0] != root:
        return TokenTree(tokens=[root], parents=[-1])
    kept = {0: 0}  # in the order of the new nodes
    tokens, parents, depths = [root], [-1], [0]
    children: list[set[int]] = [set()]
    for node, (token, parent) in enumerate(zip(tree.tokens[1:], tree.parents[1:], strict=True), start=1):
        if parent not in kept or not 0 <= token < vocab_size or len(tokens) >= max_nodes:
            continue
        above = kept[parent]
        if token in children[above] or depths[above] >= max_depth:
            continue
        children[above].add(token)
        kept[node] = len(tokens)
        tokens.append(token)
        parents.append(above)
        depths.append(depths[above] + 1)
        children.append(set())
    if isinstance(tree, ScoredTree):
        return ScoredTree(tokens=tokens, parents=parents, survival=[tree.survival[node] for node in kept])
    return TokenTree(tokens=tokens, parents=parents)
