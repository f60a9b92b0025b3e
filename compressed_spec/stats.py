"""What a run counts and times, in vLLM's words."""

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

STAGES = ("prefill", "draft", "verify", "sample", "commit")
SILENT_DRAFTS = 64  # drafted tokens after which accepting none at all is worth a warning


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of a call by stage; they sum to its wall time. A batch shares its rounds, so they are the call's."""

    prefill: float
    draft: float
    verify: float
    sample: float
    commit: float
    other: float

    @property
    def total(self) -> float:
        return self.prefill + self.draft + self.verify + self.sample + self.commit + self.other


class StageClock:
    """Accumulates the time of each stage since it was made.

    synchronize: waits for the device, so that a stage's work counts for it; by default work that a GPU has yet to do
    counts for whichever stage waits for it.
    """

    def __init__(self, synchronize: Callable[[], object] = lambda: None) -> None:
        self._synchronize = synchronize
        self._begin = time.perf_counter()
        self._seconds = dict.fromkeys(STAGES, 0.0)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._synchronize()
            self._seconds[name] += time.perf_counter() - begin

    def seconds(self) -> dict[str, float]:
        """Seconds of each stage so far."""
        return dict(self._seconds)

    def times(self) -> StageTimes:
        wall = time.perf_counter() - self._begin
        return StageTimes(**self._seconds, other=wall - sum(self._seconds.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """One request's counts.

    num_rounds: verifications. num_draft_tokens: drafted tokens verified (roots not counted). num_accepted_tokens: of
    those, emitted. num_accepted_tokens_per_pos: rounds that emitted a drafted token at depth 1, 2, ... (unconditional).
    acceptance_length: tokens emitted a round, bonus counted, pooled over rounds; without the prefill's token and a last
    round that the text's end truncated; 0.0 without such rounds. num_draft_errors: times its drafter raised.
    num_rounds_off: rounds that the tree shape chose to decode plainly, because speculation loses or to know whether it
    does.
    """

    num_rounds: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: tuple[int, ...]
    acceptance_length: float
    num_draft_errors: int
    num_rounds_off: int
    times: StageTimes


@dataclass(slots=True, kw_only=True)
class StatsBuilder:
    """A request's counts while it runs."""

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_draft_errors: int = 0
    num_rounds_off: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    whole_rounds: int = 0
    whole_tokens: int = 0

    def observe(self, *, num_nodes: int, num_accepted: int, num_emitted: int, truncated: bool) -> None:
        """One round: nodes verified, drafted tokens accepted, and tokens emitted (the bonus included).

        truncated: the round ended the text where more drafts might have been accepted, had the text gone on.
        """
        self.num_rounds += 1
        self.num_draft_tokens += num_nodes - 1
        for depth in range(min(num_accepted, num_emitted)):
            if depth == len(self.accepted_per_pos):
                self.accepted_per_pos.append(0)
            self.accepted_per_pos[depth] += 1
        if not truncated:
            self.whole_rounds += 1
            self.whole_tokens += num_emitted

    def warn_if_silent(self, drafter: str) -> None:
        """An engine that loads a draft head wrongly accepts nothing, and nothing else shows it."""
        if self.num_draft_tokens >= SILENT_DRAFTS and not self.accepted_per_pos:
            warnings.warn(
                f"None of {self.num_draft_tokens} tokens drafted by {drafter} was accepted: it may not fit this model.",
                stacklevel=2,
            )

    def build(self, times: StageTimes) -> RequestStats:
        return RequestStats(
            num_rounds=self.num_rounds,
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=sum(self.accepted_per_pos),
            num_accepted_tokens_per_pos=tuple(self.accepted_per_pos),
            acceptance_length=self.whole_tokens / self.whole_rounds if self.whole_rounds else 0.0,
            num_draft_errors=self.num_draft_errors,
            num_rounds_off=self.num_rounds_off,
            times=times,
        )
