"""What is made of timings: medians, spreads, ratios, turns, and the counts of a run."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from compressed_spec.measure.bench import speculation_ratio
from compressed_spec.measure.bench_options import BenchOptions
from compressed_spec.measure.pace import Pace, compare_pace
from compressed_spec.measure.sides import Decoded
from compressed_spec.measure.timing import in_turns, ratio, summarize
from compressed_spec.stats import RequestStats, StageTimes


def test_summaries() -> None:
    summary = summarize([5.0, 1.0, 2.0, 4.0, 3.0])
    assert summary.median == 3.0
    assert summary.spread == {"min": 1.0, "q1": 2.0, "q3": 4.0, "max": 5.0}


def test_a_ratio_is_that_of_the_medians_and_spreads_over_pairs() -> None:
    one = ratio([10.0, 40.0, 30.0], [5.0, 10.0, 20.0])
    assert one.median == 30.0 / 10.0
    assert (one.low, one.high) == (1.5, 4.0)


@pytest.mark.parametrize(("num_calls", "repeats"), [(1, 1), (1, 3), (3, 1), (3, 7), (4, 8)])
def test_turns_are_fair(num_calls: int, repeats: int) -> None:
    """Each call runs once a turn, results stay in order, and each begins equally often."""
    order: list[str] = []

    def call(name: str) -> Callable[[], int]:
        return lambda: order.append(name) or len(order)  # type: ignore[func-returns-value]

    names = [str(i) for i in range(num_calls)]
    results = in_turns({name: call(name) for name in names}, repeats)
    turns = [order[i : i + num_calls] for i in range(0, len(order), num_calls)]
    assert all(sorted(turn) == names for turn in turns)
    assert [turn[0] for turn in turns] == [names[i % num_calls] for i in range(repeats)]
    assert all(order[moment - 1] == name for name, moments in results.items() for moment in moments)
    assert all(moments == sorted(moments) and len(moments) == repeats for moments in results.values())


def stats(**changes: Any) -> RequestStats:
    times = StageTimes(prefill=1.0, draft=0.1, verify=0.4, sample=0.05, commit=0.05, other=0.2)
    counts: dict[str, Any] = {
        "num_rounds": 4,
        "num_draft_tokens": 12,
        "num_accepted_tokens": 6,
        "num_accepted_tokens_per_pos": (4, 2),
        "acceptance_length": 2.5,
        "num_draft_errors": 0,
        "num_rounds_off": 0,
        "times": times,
    }
    return RequestStats(**counts | changes)


def decoded(texts: list[list[int]], seconds: float = 0.8, **changes: Any) -> Decoded:
    return Decoded(
        texts=texts,
        prefill_seconds=1.0,
        decode_seconds=seconds,
        total_seconds=seconds + 1.5,
        stats=(stats(**changes),),
    )


def test_a_pace_counts_what_came_after_the_prefill() -> None:
    """Two repeats of two prompts; the first token of a text is the prefill's."""
    eleven, six = list(range(11)), list(range(6))
    pace = Pace(
        repeats=(
            (decoded([eleven]), decoded([six], 0.2)),
            (decoded([eleven], 2.0), decoded([six, six], 0.5)),
        )
    )
    assert pace.tokens_per_second == [15 / 1.0, 20 / 2.5]
    assert pace.seconds_per_text == [pytest.approx(2.0), pytest.approx(2.75)]
    assert pace.acceptance_length == 35 / 16
    assert pace.num_accepted == 24


def test_stages_are_means_of_a_round_and_add_up() -> None:
    pace = Pace(repeats=((decoded([[1] * 11]), decoded([[1] * 11])),))
    stages = pace.stage_milliseconds
    assert stages == pytest.approx(
        {"draft": 25.0, "verify": 100.0, "sample": 12.5, "commit": 12.5, "other": 50.0, "round": 200.0}
    )
    assert sum(stages.values()) == pytest.approx(2 * stages["round"])


def test_differing_texts_are_counted_in_every_repeat() -> None:
    a, b = [1, 2, 3], [1, 2, 4]
    plain = Pace(repeats=((decoded([a]), decoded([b])),))
    other = Pace(repeats=((decoded([a]), decoded([b])), (decoded([b]), decoded([b])), (decoded([b]), decoded([a]))))
    assert other.num_differing(plain) == 3
    assert plain.num_differing(plain) == 0


def test_no_ratio_where_nothing_was_accepted_or_weights_are_random() -> None:
    pace = Pace(repeats=((decoded([[1] * 11]),),))
    nothing = Pace(repeats=((decoded([[1] * 11], num_accepted_tokens=0),),))
    summary = speculation_ratio(pace, [6.25], BenchOptions())
    assert summary is not None
    assert summary.median == 2.0
    assert speculation_ratio(nothing, [6.25], BenchOptions()) is None
    assert speculation_ratio(pace, [6.25], BenchOptions(random_weights=True)) is None


@dataclass(frozen=True, slots=True, kw_only=True)
class CountingSide:
    """Writes a given text and remembers what it was asked."""

    text: list[int]
    asked: list[tuple[Any, int, bool]] = field(default_factory=list)

    def decode(self, prompts_ids: Sequence[Sequence[int]], max_new_tokens: int, *, stop: bool) -> Decoded:
        self.asked.append((prompts_ids, max_new_tokens, stop))
        return decoded([self.text for _ in prompts_ids])


def test_every_side_decodes_every_prompt_in_every_repeat() -> None:
    sides = {name: CountingSide(text=[1, 2, 3]) for name in "ab"}
    prompts = [[[1]], [[2], [3]]]
    paces = compare_pace(sides, prompts, max_new_tokens=9, repeats=2, stop=True)
    for name, side in sides.items():
        assert side.asked[0] == ([[1]], 8, False)  # a warm-up
        assert side.asked[1:] == [([[1]], 9, True)] * 2 + [([[2], [3]], 9, True)] * 2
        assert [[len(one.texts) for one in repeat] for repeat in paces[name].repeats] == [[1, 2], [1, 2]]


def test_texts_without_a_second_token_are_refused() -> None:
    with pytest.raises(ValueError, match="The texts of b end with their first token"):
        compare_pace(
            {"a": CountingSide(text=[1, 2]), "b": CountingSide(text=[1])},
            [[[1]]],
            max_new_tokens=2,
            repeats=1,
            stop=True,
        )
