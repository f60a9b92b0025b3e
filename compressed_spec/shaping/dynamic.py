"""Best-first trees whose scores are kept calibrated to the target's acceptance: `dynamic_sN_kK_dD`."""

from collections.abc import Sequence

from compressed_spec.drafting.base import DraftPlan
from compressed_spec.drafting.scoring import Scoring
from compressed_spec.shaping.base import RoundOutcome, RoundState
from compressed_spec.shaping.tracking import AcceptanceTracker
from compressed_spec.tree import TokenTree, TreeShape

RECALIBRATE_EVERY = 64  # verified trees


class DynamicShaper:
    """Always the same caps; the best nodes by path probability, as `scoring` and what was accepted since have it."""

    def __init__(self, shape: TreeShape, scoring: Scoring) -> None:
        self._shape, self._scoring = shape, scoring
        self._tracker, self._num_trees = AcceptanceTracker(), 0

    @property
    def largest(self) -> DraftPlan:
        return DraftPlan(shape=self._shape, scoring=self._scoring, by_value=True)

    def plan(self, state: RoundState) -> DraftPlan | None:
        return self.largest

    def prune(self, state: RoundState, trees: Sequence[TokenTree]) -> Sequence[TokenTree]:
        return trees

    def observe(self, outcome: RoundOutcome) -> None:
        for tree, path in zip(outcome.trees, outcome.paths, strict=True):
            self._tracker.observe(tree, path)
            self._num_trees += 1
            if self._num_trees % RECALIBRATE_EVERY == 0:
                self._scoring = self._tracker.recalibrated(self._scoring)
