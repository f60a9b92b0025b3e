"""Bootstrap intervals of ratios of sums: over requests drawn anew, and over repeats drawn anew.

R = repeats, N = requests, S = resamples
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
NUM_RESAMPLES = 2000
CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate, and the ends of its 95 % interval (percentiles of the resamples)."""

    estimate: float
    low: float
    high: float

    def overlaps(self, other: "Interval") -> bool:
        """Whether the two intervals share a value."""
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """How often each repeat and each request is drawn in each resample; sides of a comparison share them."""

    repeats_SR: Floats
    requests_SN: Floats

    @classmethod
    def draw(cls, num_repeats: int, num_requests: int, seed: int = 0) -> "Weights":
        """Repeats and requests, each with replacement, as many as there are."""
        rng = np.random.default_rng(seed)
        return cls(repeats_SR=_draws(rng, num_repeats), requests_SN=_draws(rng, num_requests))


def _draws(rng: np.random.Generator, count: int) -> Floats:
    return rng.multinomial(count, np.full(count, 1 / count), size=NUM_RESAMPLES).astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioSums:
    """The two parts of a ratio, of each request in each repeat; 0 over 0 is 0."""

    above_RN: Floats
    below_RN: Floats

    @property
    def num_repeats(self) -> int:
        return len(self.above_RN)

    @property
    def num_requests(self) -> int:
        return len(self.above_RN[0])

    def ratio(self) -> float:
        """All of above over all of below."""
        below = self.below_RN.sum()
        return float(self.above_RN.sum() / below) if below else 0.0

    def take(self, requests: Sequence[int]) -> "RatioSums":
        """These requests alone."""
        return RatioSums(above_RN=self.above_RN[:, requests], below_RN=self.below_RN[:, requests])

    @staticmethod
    def join(parts: Sequence["RatioSums"]) -> "RatioSums":
        """Requests of all parts, one after the other."""
        return RatioSums(
            above_RN=np.concatenate([part.above_RN for part in parts], axis=1),
            below_RN=np.concatenate([part.below_RN for part in parts], axis=1),
        )

    def resampled(self, weights: Weights) -> Floats:
        """The ratio in each resample, `[S]`."""
        above_S, below_S = (
            ((weights.repeats_SR @ part_RN) * weights.requests_SN).sum(axis=1)
            for part_RN in (self.above_RN, self.below_RN)
        )
        return _divide(above_S, below_S)

    def interval(self) -> Interval:
        """The ratio with its own interval."""
        return interval(self.ratio(), self.resampled(Weights.draw(self.num_repeats, self.num_requests)))


def gain_interval(first: RatioSums, second: RatioSums) -> Interval:
    """`second` / `first` - 1, both drawn alike: what makes a request or a repeat slow for both does not count."""
    weights = Weights.draw(first.num_repeats, first.num_requests)
    gain_S = _divide(second.resampled(weights), first.resampled(weights)) - 1
    estimate = second.ratio() / first.ratio() - 1 if first.ratio() else 0.0
    return interval(estimate, gain_S)


def interval(estimate: float, resampled_S: Floats) -> Interval:
    """The percentile interval of resamples."""
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(resampled_S, [tail, 100 - tail])
    return Interval(estimate=estimate, low=float(low), high=float(high))


def _divide(above_S: Floats, below_S: Floats) -> Floats:
    return np.divide(above_S, below_S, out=np.zeros_like(above_S), where=below_S > 0)
