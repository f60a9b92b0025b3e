"""From what happened to each request to a point's results."""

import hashlib
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from compressed_spec.decode import Decoder
from compressed_spec.measure.load import Run, Timeline
from compressed_spec.measure.quality import Judgement
from compressed_spec.measure.record import (
    AcceptanceRecord,
    Latency,
    PositionBucket,
    Quality,
    RequestRecord,
    Throughput,
)
from compressed_spec.stats import StatsBuilder

BUCKET = 32  # output tokens that by_output_position counts together


def request_record(
    index: int,
    prompt_id: str,
    category: str | None,
    prompt_tokens: int,
    timeline: Timeline,
    stats: StatsBuilder,
    judgement: Judgement,
) -> RequestRecord:
    """One request's line. A request that was refused has no tokens, and stats of none."""
    tokens, times = timeline.token_ids, timeline.times
    if timeline.error is not None:
        finish_reason = "error"
    else:
        assert timeline.finished, "a run ends when every request has"
        finish_reason = "timeout" if timeline.timed_out else str(timeline.chunks[-1].finish_reason)
    return RequestRecord(
        index=index,
        prompt_id=prompt_id,
        category=category,
        prompt_tokens=prompt_tokens,
        completion_tokens=len(tokens),
        finish_reason=finish_reason,
        error=timeline.error,
        arrival=timeline.arrival,
        ttft_ms=1e3 * (times[0] - timeline.arrival) if times else None,
        e2el_ms=1e3 * (times[-1] - timeline.arrival) if times else None,
        prefill_seconds=timeline.prefill_seconds,
        decode_seconds=timeline.decode_seconds,
        num_rounds=stats.num_rounds,
        num_draft_tokens=stats.num_draft_tokens,
        num_accepted_tokens=sum(stats.accepted_per_pos),
        whole_rounds=stats.whole_rounds,
        whole_tokens=stats.whole_tokens,
        output_hash=hashlib.sha256(np.asarray(tokens, dtype=np.int64).tobytes()).hexdigest(),
        correct=judgement.correct,
        well_formed=judgement.well_formed,
        looping=judgement.looping,
    )


def throughput(run: Run, requests: Sequence[RequestRecord]) -> Throughput:
    """Tokens and requests over the wall time of a run."""
    served = [request for request in requests if request.error is None]
    completed = sum(request.finish_reason in ("stop", "length") for request in served)
    tokens_in = sum(request.prompt_tokens for request in served)
    tokens_out = sum(request.completion_tokens for request in served)
    return Throughput(
        duration=run.duration,
        completed=completed,
        failed=len(requests) - len(served),
        timed_out=len(served) - completed,
        total_input_tokens=tokens_in,
        total_output_tokens=tokens_out,
        request_throughput=completed / run.duration,
        output_throughput=tokens_out / run.duration,
        total_token_throughput=(tokens_in + tokens_out) / run.duration,
        decode_throughput=_ratio(
            sum(max(request.completion_tokens - 1, 0) for request in served),
            sum(request.decode_seconds for request in served),
        ),
        max_concurrent_requests=run.max_concurrent_requests,
        mean_concurrency=sum(request.e2el_ms or 0.0 for request in served) / 1e3 / run.duration,
    )


def latency(timelines: Sequence[Timeline], requests: Sequence[RequestRecord]) -> Latency:
    """Of the requests that had an answer, cut off or not; vLLM's definitions."""
    answered = [request for request in requests if request.ttft_ms is not None and request.e2el_ms is not None]
    samples = {
        "ttft": [request.ttft_ms or 0.0 for request in answered],
        "tpot": [
            ((request.e2el_ms or 0.0) - (request.ttft_ms or 0.0)) / (request.completion_tokens - 1)
            for request in answered
            if request.completion_tokens > 1
        ],
        "itl": [1e3 * gap for timeline in timelines for gap in np.diff(timeline.times).tolist()],
        "e2el": [request.e2el_ms or 0.0 for request in answered],
    }
    return Latency(**{name: value for kind, values in samples.items() for name, value in _spread(kind, values).items()})


def _spread(kind: str, values: Sequence[float]) -> dict[str, float | None]:
    names = [f"{what}_{kind}_ms" for what in ("mean", "median", "std", "p90", "p95", "p99")]
    if not values:
        return dict.fromkeys(names)
    p50, p90, p95, p99 = np.percentile(values, [50, 90, 95, 99])
    return dict(zip(names, map(float, (np.mean(values), p50, np.std(values), p90, p95, p99)), strict=True))


def acceptance(decoder: Decoder, timelines: Sequence[Timeline], requests: Sequence[RequestRecord]) -> AcceptanceRecord:
    """Counts of all requests together; see `ACCEPTANCE_DEFINITION`."""
    stats = [decoder.stats[timeline.number] for timeline in timelines if timeline.number is not None]
    rounds = sum(one.num_rounds for one in stats)
    drafted = sum(one.num_draft_tokens for one in stats)
    per_pos = _sum_lists([one.accepted_per_pos for one in stats])
    histogram: dict[int, int] = defaultdict(int)
    buckets: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    for timeline in timelines:
        place = len(timeline.chunks[0].token_ids) if timeline.chunks else 0
        for chunk in timeline.chunks[1:]:  # the first is the prefill's
            histogram[chunk.num_accepted] += 1
            if chunk.finish_reason is None:  # a last round may be cut short
                bucket = buckets[place // BUCKET]
                bucket[0] += 1
                bucket[1] += len(chunk.token_ids)
            place += len(chunk.token_ids)
    own = [request.whole_tokens / request.whole_rounds for request in requests if request.whole_rounds]
    return AcceptanceRecord(
        num_rounds=rounds,
        num_draft_tokens=drafted,
        num_accepted_tokens=sum(per_pos),
        acceptance_length=_ratio(sum(one.whole_tokens for one in stats), sum(one.whole_rounds for one in stats)),
        mean_request_acceptance_length=_ratio(sum(own), len(own)),
        draft_acceptance_rate=_ratio(sum(per_pos), drafted),
        candidates_per_round=_ratio(drafted, rounds),
        num_accepted_tokens_per_pos=tuple(per_pos),
        acceptance_rate_per_pos=tuple(_ratio(count, rounds) for count in per_pos),
        conditional_acceptance_rate_per_pos=tuple(
            _ratio(count, before) for before, count in zip([rounds, *per_pos], per_pos, strict=False)
        ),
        accepted_histogram=tuple(histogram[count] for count in range(max(histogram, default=-1) + 1)),
        by_output_position=tuple(
            PositionBucket(start=BUCKET * number, num_rounds=counts[0], num_tokens=counts[1])
            for number, counts in sorted(buckets.items())
        ),
        num_rounds_off=sum(one.num_rounds_off for one in stats),
        num_draft_errors=sum(one.num_draft_errors for one in stats),
    )


def quality(requests: Sequence[RequestRecord]) -> Quality:
    """Shares of the requests that ran."""
    ran = [request for request in requests if request.error is None]
    return Quality(
        accuracy=_share([request.correct for request in ran]),
        format_rate=_share([request.well_formed for request in ran]),
        completion_rate=_ratio(sum(request.finish_reason == "stop" for request in ran), len(ran)),
        loop_rate=_ratio(sum(request.looping for request in ran), len(ran)),
    )


def _share(answers: Sequence[bool | None]) -> float | None:
    given = [answer for answer in answers if answer is not None]
    return sum(given) / len(given) if given else None


def _ratio(above: float, below: float) -> float:
    return above / below if below else 0.0


def _sum_lists(lists: Sequence[Sequence[int]]) -> list[int]:
    return [sum(one[i] for one in lists if i < len(one)) for i in range(max((len(one) for one in lists), default=0))]
