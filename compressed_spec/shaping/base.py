"""What decides, round by round, which trees are asked for."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from compressed_spec.drafting.base import DraftPlan
from compressed_spec.tree import TokenTree


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundState:
    """A round before it is drafted.

    num_rows: sequences that take part. context: their mean committed length, in tokens. max_depth: how deep the deepest
    of their trees may reach, at least 1. sampled: drafts will be drawn from a law, so that the topology may depend on
    earlier rounds alone.
    """

    num_rows: int
    context: int
    max_depth: int
    sampled: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundOutcome:
    """A round that is over: its trees as verified, the accepted path of each (root first), and its seconds.

    plan: what was asked for, None where the round was decoded plainly. verify_seconds: all that plain decoding needs
    too: verifying, sampling and committing.
    """

    state: RoundState
    plan: DraftPlan | None
    trees: tuple[TokenTree, ...]
    paths: tuple[tuple[int, ...], ...]
    draft_seconds: float
    verify_seconds: float


@runtime_checkable
class Shaper(Protocol):
    """The interface of every tree shape. It can only cost speed: the text does not depend on it."""

    @property
    def largest(self) -> DraftPlan:
        """The largest plan that it may give, in nodes and in draft nodes a row; the cache is made for it."""

    def plan(self, state: RoundState) -> DraftPlan | None:
        """The trees to ask for this round; None to decode it plainly."""

    def prune(self, state: RoundState, trees: Sequence[TokenTree]) -> Sequence[TokenTree]:
        """What to verify of the proposed trees, one a row. Not called for drawn trees, which must stay whole."""

    def observe(self, outcome: RoundOutcome) -> None:
        """A round is over."""


class FixedShaper:
    """The same plan every round."""

    def __init__(self, plan: DraftPlan) -> None:
        self._plan = plan

    @property
    def largest(self) -> DraftPlan:
        return self._plan

    def plan(self, state: RoundState) -> DraftPlan | None:
        return self._plan

    def prune(self, state: RoundState, trees: Sequence[TokenTree]) -> Sequence[TokenTree]:
        return trees

    def observe(self, outcome: RoundOutcome) -> None:
        pass
