"""Put requests to a decoder, as a fixed number of clients or at given times, and note when their tokens come.

Times are seconds since the start. A request's time runs from its arrival, be it before a row was free.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
import torch

from compressed_spec.decode import Chunk, Decoder, Request, StopCheck
from compressed_spec.measure.record import StageSeconds
from compressed_spec.stats import StageClock


@dataclass(slots=True, kw_only=True)
class Timeline:
    """What became of one request. number: the decoder's, None if it was refused. chunks, times: as they came.

    prefill_seconds, decode_seconds: its shares of the steps that it took part in.
    """

    arrival: float
    number: int | None = None
    error: str | None = None
    timed_out: bool = False
    chunks: list[Chunk] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def finished(self) -> bool:
        return bool(self.chunks) and self.chunks[-1].finish_reason is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Timelines in the order of the requests; seconds from the start to the last token, by stage."""

    timelines: tuple[Timeline, ...]
    duration: float
    stages: StageSeconds
    max_concurrent_requests: int


def arrival_times(count: int, rate: float, process: str, seed: int) -> list[float]:
    """When `count` requests come at `rate` a second, from 0.0 on: "poisson" (gaps drawn) or "uniform" (equal gaps).

    The same seed gives the same times, and another rate the same times stretched.
    """
    gaps = np.random.default_rng(seed).exponential(size=count) if process == "poisson" else np.ones(count)
    times = np.cumsum(gaps) / rate
    return [float(moment) for moment in times - times[0]] if count else []


class Load:
    """One run of requests through a decoder made for them, which must hold none yet.

    concurrency: closed loop; so many clients, each of which has its next request when its last one is answered.
    arrivals: open loop; when each request comes, whatever the decoder is doing. request_timeout: seconds after which
    one is cut off. agree: the first process's value in all of them. on_finish: called as a request ends.
    """

    def __init__(
        self,
        decoder: Decoder,
        requests: Sequence[Request],
        *,
        concurrency: int | None = None,
        arrivals: Sequence[float] | None = None,
        request_timeout: float | None = None,
        agree: Callable[[float], float] = lambda value: value,
        on_finish: Callable[[], object] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        assert (concurrency is None) != (arrivals is None), "one of the two loops"
        self._decoder, self._requests, self._concurrency = decoder, requests, concurrency
        self._timelines = [
            Timeline(arrival=0.0 if arrivals is None else moment) for moment in arrivals or [0.0] * len(requests)
        ]
        self._timeout, self._agree, self._on_finish = request_timeout, agree, on_finish
        self._clock, self._sleep = clock, sleep
        self._waiting = deque(range(len(requests)))
        self._under_way: dict[int, int] = {}  # the decoder's number -> index
        self._now = 0.0
        self._max_concurrent = 0

    def run(self) -> Run:
        """Until every request has ended; one that the decoder refuses has an error. Rows are released in any case."""
        stage_clock = self._decoder.clock = StageClock(_synchronize(self._decoder.cache.device))
        begin, idle, done = self._clock(), 0.0, 0.0
        try:
            while self._waiting or self._under_way:
                self._now = self._agree(self._clock() - begin)
                self._submit()
                if not self._under_way:
                    if self._waiting:
                        self._sleep(max(self._timelines[self._waiting[0]].arrival - self._now, 0.0))
                        since, done = done, self._clock() - begin
                        idle += done - since
                    continue
                chunks = self._decoder.step()
                since, done = done, self._clock() - begin
                self._record(chunks, done, done - since)
        finally:
            self._decoder.close()
        spent = stage_clock.seconds()
        return Run(
            timelines=tuple(self._timelines),
            duration=done,
            stages=StageSeconds(**spent, idle=idle, other=done - idle - sum(spent.values())),
            max_concurrent_requests=self._max_concurrent,
        )

    def _submit(self) -> None:
        while self._waiting:
            index = self._waiting[0]
            timeline = self._timelines[index]
            if self._concurrency is not None:
                if len(self._under_way) >= self._concurrency:
                    return
                timeline.arrival = self._now
            elif timeline.arrival > self._now:
                return
            self._waiting.popleft()
            try:
                timeline.number = self._decoder.submit(self._watched(index))
            except ValueError as error:
                timeline.error = str(error)
                self._on_finish()
                continue
            self._under_way[timeline.number] = index
            self._max_concurrent = max(self._max_concurrent, len(self._under_way))

    def _watched(self, index: int) -> Request:
        """The request, with a check that cuts it off when its time is over."""
        request = self._requests[index]
        return request if self._timeout is None else replace(request, stop_check=self._deadline(index, request))

    def _deadline(self, index: int, request: Request) -> StopCheck:
        timeline, timeout = self._timelines[index], self._timeout
        assert timeout is not None, "asked for with a timeout only"
        assert request.stop_check is None, "requests of a load have no checks of their own"

        def check(output_ids: Sequence[int], token_ids: Sequence[int]) -> int | None:
            ends = len(output_ids) + len(token_ids) == request.max_new_tokens or token_ids[-1] in request.stop_token_ids
            if ends or self._now - timeline.arrival < timeout:
                return None
            timeline.timed_out = True
            return len(token_ids)

        return check

    def _record(self, chunks: Sequence[Chunk], now: float, seconds: float) -> None:
        for chunk in chunks:
            timeline = self._timelines[self._under_way[chunk.request]]
            if timeline.chunks:
                timeline.decode_seconds += seconds / len(chunks)
            else:
                timeline.prefill_seconds += seconds / len(chunks)
            timeline.chunks.append(chunk)
            timeline.times.append(now)
            if chunk.finish_reason is not None:
                del self._under_way[chunk.request]
                self._on_finish()


def _synchronize(device: torch.device) -> Callable[[], object]:
    """What waits for a device; nothing does on a CPU, and a round's sampling waits for a GPU in any case."""
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
