"""What was measured of a drafter's acceptance by a model: the file behind `optimal` and `dynamic`."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from compressed_spec.drafting.scoring import Scoring
from compressed_spec.shaping.static import read_json

# Fitted on a small trained model; a head's law is too flat, so its scores are sharpened until a file says better.
DEFAULT_SCORING = Scoring(greedy_temperature=0.6, sampled_temperature=0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """A drafter's acceptance at one sampling temperature.

    acceptance: one row a depth (1: the root's children), one entry a rank: how often the target's token was the child
    of that rank, once its text had reached the parent. num_tried: how often that was seen. score_temperature: of the
    drafter's scores, fitted; None where it has no law. log_bias: see Scoring. Only `acceptance` must be in the file.
    Raises ValueError for a table that is empty, or rates outside 0 .. 1.
    """

    acceptance: tuple[tuple[float, ...], ...]
    num_tried: tuple[tuple[int, ...], ...] = ()
    temperature: float = 0.0
    score_temperature: float | None = None
    log_bias: tuple[tuple[float, ...], ...] = ()
    drafter: str = ""

    def __post_init__(self) -> None:
        if not self.acceptance or not all(self.acceptance):
            raise ValueError("needs an acceptance table: at least one depth, and at least one rank at each")
        if not all(0 <= rate <= 1 for row in self.acceptance for rate in row):
            raise ValueError("has acceptance rates outside 0 .. 1")
        if self.score_temperature is not None and not 0 < self.score_temperature < math.inf:
            raise ValueError("has a score_temperature that is not above 0")

    @property
    def scoring(self) -> Scoring:
        """How to score nodes so that a score is a chance of acceptance."""
        scoring = replace(DEFAULT_SCORING, log_bias=self.log_bias)
        if self.score_temperature is None:
            return scoring
        if self.temperature == 0:
            return replace(scoring, greedy_temperature=self.score_temperature)
        return replace(scoring, sampled_temperature=self.score_temperature)

    def save(self, path: str) -> None:
        """Write the file, as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def read_calibration(path: str) -> Calibration:
    """The measurement in a JSON file. Raises ValueError, naming it, if it holds none."""
    parsed = read_json(path, "calibration")
    if not isinstance(parsed, dict):
        raise ValueError(f'The calibration file {path} needs an object with "acceptance", a table by depth and rank.')
    try:
        temperature, score = parsed.get("temperature", 0.0), parsed.get("score_temperature")
        return Calibration(
            acceptance=_table(parsed.get("acceptance", [])),
            num_tried=tuple(tuple(map(int, row)) for row in parsed.get("num_tried", [])),
            temperature=float(temperature),
            score_temperature=None if score is None else float(score),
            log_bias=_table(parsed.get("log_bias", [])),
            drafter=str(parsed.get("drafter", "")),
        )
    except (TypeError, ValueError) as error:
        raise ValueError(f"The calibration file {path} {error}; measure again with scripts/calibrate.py.") from error


def _table(rows: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(map(float, row)) for row in rows)
