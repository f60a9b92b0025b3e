"""Requests in a closed and an open loop, on a clock that a step advances by one second."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from compressed_spec.decode import Chunk, Decoder, Request
from compressed_spec.generate import make_requests, prepare_decoder
from compressed_spec.measure.load import Load, Run, arrival_times
from compressed_spec.sampling_params import SamplingParams
from compressed_spec.testing import MarkovModel, cycle

VOCABULARY = 16


class Machine:
    """A decoder whose steps take `step_seconds` of a clock of its own."""

    def __init__(self, requests: Sequence[Request], tree: str, batch_size: int, step_seconds: float = 1.0) -> None:
        self.now, self.step_seconds, self.steps = 100.0, step_seconds, list[list[int]]()
        self.decoder: Decoder = prepare_decoder(
            MODEL, requests, tree=tree, drafter="auto", verifier="auto", batch_size=batch_size
        )
        self._step: Callable[[], list[Chunk]] = self.decoder.step
        self.decoder.step = self.step  # type: ignore[method-assign]

    def step(self) -> list[Chunk]:
        self.now += self.step_seconds
        chunks = self._step()
        self.steps.append([chunk.request for chunk in chunks])
        return chunks

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def clock(self) -> float:
        return self.now


MODEL = MarkovModel(cycle(VOCABULARY), cycle(VOCABULARY))


def requests(lengths: Sequence[int]) -> list[Request]:
    made = []
    for start, length in enumerate(lengths):
        made += make_requests(MODEL, [[start, start + 1]], SamplingParams(), max_new_tokens=length, stop_token_ids=[])
    return made


def run(lengths: Sequence[int], *, tree: str = "off", batch_size: int = 2, **more: Any) -> Run:
    some = requests(lengths)
    machine = Machine(some, tree, batch_size)
    if "arrivals" not in more:
        more["concurrency"] = batch_size
    return Load(machine.decoder, some, clock=machine.clock, sleep=machine.sleep, **more).run()


def times(found: Run) -> list[tuple[float, list[float]]]:
    return [(timeline.arrival, timeline.times) for timeline in found.timelines]


def test_a_client_has_its_next_request_when_its_last_one_is_answered() -> None:
    found = run([3, 3, 3, 3])
    assert times(found) == [(0, [1, 2, 3]), (0, [1, 2, 3]), (3, [4, 5, 6]), (3, [4, 5, 6])]
    assert found.duration == 6
    assert found.max_concurrent_requests == 2
    assert [(one.prefill_seconds, one.decode_seconds) for one in found.timelines] == [(0.5, 1.0)] * 4


def test_who_joins_holds_up_the_others() -> None:
    """Request 2 is prefilled in step 2, in which request 1 has to wait; shares are of whoever a step served."""
    found = run([1, 3, 2])
    assert times(found) == [(0, [1]), (0, [1, 3, 4]), (1, [2, 3])]
    assert [(one.prefill_seconds, one.decode_seconds) for one in found.timelines] == [(0.5, 0), (0.5, 1.5), (1, 0.5)]
    assert found.duration == 4


def test_tokens_are_those_of_the_requests_whatever_the_load() -> None:
    for tree in ("off", "s3_k1_d4", "s3_k2_d6"):
        for found in (run([7, 1, 5, 9], tree=tree), run([7, 1, 5, 9], tree=tree, arrivals=[0.0, 0.5, 9.0, 9.1])):
            for start, (timeline, length) in enumerate(zip(found.timelines, [7, 1, 5, 9], strict=True)):
                assert timeline.token_ids == [(start + 2 + i) % VOCABULARY for i in range(length)]
                assert timeline.finished
            shares = sum(one.prefill_seconds + one.decode_seconds for one in found.timelines)
            assert shares == pytest.approx(found.duration - found.stages.idle)
            assert found.stages.total == pytest.approx(found.duration)


def test_an_open_loop_waits_for_arrivals() -> None:
    found = run([3, 3, 3], arrivals=arrival_times(3, 0.1, "uniform", seed=0))
    assert times(found) == [(0, [1, 2, 3]), (10, [11, 12, 13]), (20, [21, 22, 23])]
    assert found.stages.idle == 14
    assert found.max_concurrent_requests == 1


def test_an_overloaded_open_loop_counts_the_waiting() -> None:
    found = run([3, 3, 3], batch_size=1, arrivals=arrival_times(3, 1.0, "uniform", seed=0))
    assert times(found) == [(0, [1, 2, 3]), (1, [4, 5, 6]), (2, [7, 8, 9])]
    assert found.stages.idle == 0
    assert found.max_concurrent_requests == 3


def test_poisson_arrivals() -> None:
    moments = arrival_times(4000, 8.0, "poisson", seed=1)
    gaps = np.diff(moments)
    assert moments[0] == 0
    assert (gaps > 0).all()
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.06)  # 4 standard errors
    assert gaps.std() == pytest.approx(1 / 8, rel=0.1)  # an exponential's is its mean
    assert moments == arrival_times(4000, 8.0, "poisson", seed=1)
    assert moments != arrival_times(4000, 8.0, "poisson", seed=2)
    assert arrival_times(4000, 2.0, "poisson", seed=1) == pytest.approx([4 * moment for moment in moments])
    assert arrival_times(3, 4.0, "uniform", seed=1) == [0, 0.25, 0.5]


def test_a_request_whose_time_is_over_is_cut_off() -> None:
    found = run([9, 2, 3], batch_size=1, request_timeout=1.5)
    assert [len(one.token_ids) for one in found.timelines] == [3, 2, 3]
    # The last one ends by its length in the very step in which its time is over.
    assert [one.timed_out for one in found.timelines] == [True, False, False]
    assert all(one.finished for one in found.timelines)


def test_a_refused_request_is_recorded_and_the_others_run() -> None:
    some = requests([3, 3, 3])
    endless = make_requests(MODEL, [[1]], SamplingParams(), max_new_tokens=5000, stop_token_ids=[])
    machine = Machine(some, "s3_k2_d6", 1)
    finished = []
    load = Load(
        machine.decoder,
        [some[0], *endless, some[2]],
        concurrency=1,
        clock=machine.clock,
        sleep=machine.sleep,
        on_finish=lambda: finished.append(machine.now),
    )
    found = load.run()
    assert [one.error is None for one in found.timelines] == [True, False, True]
    assert "5000" in str(found.timelines[1].error)
    assert [len(one.token_ids) for one in found.timelines] == [3, 0, 3]
    assert len(finished) == 3


def test_rows_are_released_after_a_failure() -> None:
    some = requests([8, 8])
    machine = Machine(some, "off", 2)
    step = machine.decoder.step

    def fails() -> list[Chunk]:
        if len(machine.steps) == 3:
            raise RuntimeError("out of memory")
        return step()

    machine.decoder.step = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="out of memory"):
        Load(machine.decoder, some, concurrency=2, clock=machine.clock, sleep=machine.sleep).run()
    assert machine.decoder.cache.lengths == (0, 0)


def test_processes_do_the_same_by_the_first_ones_clock() -> None:
    """The second process is three times as slow, and decides by what the first one says."""
    said: list[float] = []
    some = requests([4, 4, 4, 4])
    arrivals = [0.0, 1.5, 3.5, 20.0]

    def first_says(value: float) -> float:
        said.append(value)
        return value

    first = Machine(some, "off", 2)
    Load(first.decoder, some, arrivals=arrivals, clock=first.clock, sleep=first.sleep, agree=first_says).run()
    heard = iter(said)
    second = Machine(some, "off", 2, step_seconds=3.0)
    Load(
        second.decoder, some, arrivals=arrivals, clock=second.clock, sleep=second.sleep, agree=lambda _: next(heard)
    ).run()
    assert second.steps == first.steps
    assert list(heard) == []
    alone = Machine(some, "off", 2, step_seconds=3.0)
    Load(alone.decoder, some, arrivals=arrivals, clock=alone.clock, sleep=alone.sleep).run()
    assert alone.steps != first.steps
