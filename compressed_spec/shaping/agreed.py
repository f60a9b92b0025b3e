"""A shaper of which the first process of a group alone has the say."""

from collections.abc import Sequence

from compressed_spec.drafting.base import DraftPlan
from compressed_spec.parallel import ParallelGroup
from compressed_spec.shaping.base import RoundOutcome, RoundState, Shaper
from compressed_spec.tree import TokenTree


class AgreedShaper:
    """Asks a shaper on the first process only: what it measures, such as seconds, differs from process to process."""

    def __init__(self, shaper: Shaper, group: ParallelGroup) -> None:
        self._shaper, self._group = shaper, group

    @property
    def largest(self) -> DraftPlan:
        return self._shaper.largest

    def plan(self, state: RoundState) -> DraftPlan | None:
        return self._group.decide(lambda: self._shaper.plan(state))

    def prune(self, state: RoundState, trees: Sequence[TokenTree]) -> Sequence[TokenTree]:
        return self._group.decide(lambda: self._shaper.prune(state, trees))

    def observe(self, outcome: RoundOutcome) -> None:
        if self._group.is_first:
            self._shaper.observe(outcome)
