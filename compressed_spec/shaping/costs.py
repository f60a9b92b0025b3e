"""How long a round takes, as a function of its size: fitted to measurements, used to weigh trees against each other."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import mul

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SWEEPS = 2000  # of coordinate descent, on a handful of coefficients


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySample:
    """Seconds that it took to verify, sample and commit `num_nodes` nodes of `num_rows` rows with this context."""

    num_rows: int
    num_nodes: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSample:
    """Seconds that it took to draft `num_steps` steps of `num_rows` rows, K children a node."""

    num_rows: int
    num_steps: int
    top_k: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of verifying and of drafting, each a sum of terms with coefficients of 0 or more.

    verify: a constant, rows, nodes, nodes x context, and the distinct experts that the nodes are expected to touch in
    an MoE layer (whose weights must then be read). draft: a constant, steps, and nodes of all steps.
    num_experts: distinct experts of a layer as a function of nodes; 0 for a dense model.
    """

    verify: tuple[float, ...]
    draft: tuple[float, ...]
    num_experts: Callable[[float], float]

    def verify_seconds(self, num_rows: int, num_nodes: int, context: int) -> float:
        return math.fsum(map(mul, self.verify, _verify_terms(num_rows, num_nodes, context, self.num_experts)))

    def draft_seconds(self, num_rows: int, num_steps: int, top_k: int) -> float:
        return math.fsum(map(mul, self.draft, _draft_terms(num_rows, num_steps, top_k)))


def fit_costs(
    verify: Sequence[VerifySample], draft: Sequence[DraftSample], num_experts: Callable[[float], float]
) -> CostModel:
    """The cost model with the smallest relative squared error on these samples; drafting is free without any of it.

    Raises ValueError without a verify sample, or for a sample that took no time.
    """
    if not verify or min(sample.seconds for sample in verify) <= 0 or any(sample.seconds <= 0 for sample in draft):
        raise ValueError("Costs are fitted to at least one verify sample, and each must have taken some time.")
    verify_terms = [_verify_terms(s.num_rows, s.num_nodes, s.context, num_experts) for s in verify]
    draft_terms = [_draft_terms(s.num_rows, s.num_steps, s.top_k) for s in draft]
    return CostModel(
        verify=_fit(verify_terms, [s.seconds for s in verify]),
        draft=_fit(draft_terms, [s.seconds for s in draft]) if draft else (0.0, 0.0, 0.0),
        num_experts=num_experts,
    )


def _verify_terms(
    num_rows: int, num_nodes: int, context: int, num_experts: Callable[[float], float]
) -> tuple[float, ...]:
    return (1.0, num_rows, num_nodes, num_nodes * context, num_experts(num_nodes))


def _draft_terms(num_rows: int, num_steps: int, top_k: int) -> tuple[float, ...]:
    return (1.0, num_steps, num_rows * (1 + (num_steps - 1) * top_k))


def _fit(terms: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, ...]:
    """Non-negative least squares by coordinate descent, every sample weighted by 1 / seconds."""
    a_SC: Floats = np.asarray(terms, dtype=np.float64) / np.asarray(seconds, dtype=np.float64)[:, None]
    scale_C: Floats = np.sqrt((a_SC**2).sum(axis=0))
    scale_C[scale_C == 0] = 1.0
    a_SC = a_SC / scale_C
    gram_CC, target_C = a_SC.T @ a_SC, a_SC.sum(axis=0)
    x_C: Floats = np.zeros(a_SC.shape[1])
    for _ in range(SWEEPS):
        for c in range(len(x_C)):
            if gram_CC[c, c]:
                x_C[c] = max(0.0, x_C[c] + (target_C[c] - gram_CC[c] @ x_C) / gram_CC[c, c])
    return tuple(float(x) for x in x_C / scale_C)
