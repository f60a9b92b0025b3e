"""Timings taken in turns, and what is said of them: a median, and how far they spread."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A measurement's median, and its spread over repeats: least, quartiles, greatest."""

    median: float
    low: float
    first_quartile: float
    third_quartile: float
    high: float

    @property
    def spread(self) -> dict[str, float]:
        return {"min": self.low, "q1": self.first_quartile, "q3": self.third_quartile, "max": self.high}


def summarize(values: Sequence[float], *, median: float | None = None) -> Summary:
    """The summary of at least one value; `median` puts another number in the median's place."""
    low, first, middle, third, high = (float(q) for q in np.quantile(np.asarray(values), (0, 0.25, 0.5, 0.75, 1)))
    return Summary(
        median=middle if median is None else median, low=low, first_quartile=first, third_quartile=third, high=high
    )


def ratio(over: Sequence[float], under: Sequence[float]) -> Summary:
    """The quotient of two medians, and the spread of the quotients of what was measured in the same turn."""
    pairs = [a / b for a, b in zip(over, under, strict=True)]
    return summarize(pairs, median=float(np.median(over) / np.median(under)))


def seconds(call: Callable[[], object]) -> float:
    """Wall time of a call."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def fastest(call: Callable[[], object], repeats: int) -> float:
    """Least wall time of a call that has been made once before: what disturbs a machine only ever makes it slower."""
    call()
    return min(seconds(call) for _ in range(repeats))


def in_turns(calls: Mapping[str, Callable[[], Result]], repeats: int) -> dict[str, list[Result]]:
    """Results of each call, `repeats` times A B C, B C A, ...: what disturbs the machine for a while disturbs all.

    Each turn begins with another call, so that none always follows the same one. Garbage is collected beforehand.
    """
    names = list(calls)
    results: dict[str, list[Result]] = {name: [] for name in names}
    gc.collect()
    for turn in range(repeats):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            results[name].append(calls[name]())
    return results
