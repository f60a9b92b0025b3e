"""Exact laws by enumeration: run the production code once for every way its coins can fall.

Shape suffixes: V vocabulary.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

from torch import Tensor

from compressed_spec.verifying.interface import Coins, law

Outcome = TypeVar("Outcome", bound=Hashable)


class _BranchingCoins:
    """Coins that follow a script of decisions, then the first possible branch, noting the others for later runs."""

    def __init__(self, script: list[int], pending: list[list[int]]) -> None:
        self.script, self.pending = script, pending
        self.num_decisions = 0
        self.probability = 1.0

    def accept(self, probability: float) -> bool:
        assert 0 <= probability <= 1, probability
        return self._decide([1 - probability, probability]) == 1

    def choose(self, weights_V: Tensor) -> int:
        return self._decide((weights_V / weights_V.sum()).tolist())

    def coupled(self, log_p_V: Tensor, depth: int) -> int:
        """Exact where the drafts do not depend on the noise: argmax(log p + g) then has the law p."""
        return self.choose(law(log_p_V))

    def _decide(self, probabilities: Sequence[float]) -> int:
        if self.num_decisions == len(self.script):
            first, *others = [i for i, probability in enumerate(probabilities) if probability > 0]
            self.pending.extend([*self.script, other] for other in others)
            self.script.append(first)
        choice = self.script[self.num_decisions]
        self.num_decisions += 1
        self.probability *= probabilities[choice]
        return choice


def exact_law(run: Callable[[Coins], Outcome]) -> dict[Outcome, float]:
    """The probability of every outcome of `run`, whose only chance is the coins it is given.

    `run` is called once for each sequence of decisions of positive probability, so it must be cheap, and deterministic
    but for the coins. To prove a verifier, let it draw the drafts, verify them and return the emitted tokens.
    """
    outcomes: dict[Outcome, float] = {}
    pending: list[list[int]] = [[]]
    while pending:
        coins = _BranchingCoins(pending.pop(), pending)
        outcome = run(coins)
        outcomes[outcome] = outcomes.get(outcome, 0.0) + coins.probability
    return outcomes
