"""Records made up for tests."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from compressed_spec.measure.record import (
    SCHEMA,
    AcceptanceRecord,
    Environment,
    Latency,
    MemoryRecord,
    Quality,
    RequestRecord,
    Results,
    Setup,
    StageSeconds,
    SweepRecord,
    Throughput,
)

MakeRecord = Callable[..., SweepRecord]

ENVIRONMENT = Environment(
    versions={"python": "3.11"},
    git_revision=None,
    platform="somewhere",
    cpu="some",
    num_cores=2,
    num_threads=1,
    device_name="some",
    memory_bytes=1,
    argv=("sweep",),
)
SETUP = Setup(
    model="tiny",
    checkpoint_hash="sha256:0",
    tokenizer_hash="sha256:0",
    num_requests=2,
    max_new_tokens=8,
    seed=0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    repetition_penalty=1.0,
    verifier="auto",
    stop_rule="EOS",
    cache_policy="rows",
    prompt_format="raw",
    prompt_template=None,
    dtype="float32",
    weights=("F32",),
    numerics="fast",
    compiled=False,
    device="cpu",
    arrivals="poisson",
    request_timeout=None,
    warmup_tokens=0,
    num_processes=1,
)
REQUEST = RequestRecord(
    index=0,
    prompt_id="a",
    category=None,
    prompt_tokens=3,
    completion_tokens=5,
    finish_reason="stop",
    error=None,
    arrival=0.0,
    ttft_ms=1.0,
    e2el_ms=5.0,
    prefill_seconds=0.001,
    decode_seconds=0.004,
    num_rounds=2,
    num_draft_tokens=6,
    num_accepted_tokens=2,
    whole_rounds=2,
    whole_tokens=4,
    output_hash="0",
    correct=None,
    well_formed=True,
    looping=False,
)
SPREAD = ("mean", "median", "std", "p90", "p95", "p99")
RESULTS = Results(
    throughput=Throughput(
        duration=1.0,
        completed=2,
        failed=0,
        timed_out=0,
        total_input_tokens=6,
        total_output_tokens=10,
        request_throughput=2.0,
        output_throughput=10.0,
        total_token_throughput=16.0,
        decode_throughput=8.0,
        max_concurrent_requests=1,
        mean_concurrency=1.0,
    ),
    latency=Latency(**{f"{what}_{kind}_ms": None for what in SPREAD for kind in ("ttft", "tpot", "itl", "e2el")}),
    acceptance=AcceptanceRecord(
        num_rounds=4,
        num_draft_tokens=12,
        num_accepted_tokens=4,
        acceptance_length=2.0,
        mean_request_acceptance_length=2.0,
        draft_acceptance_rate=1 / 3,
        candidates_per_round=3.0,
        num_accepted_tokens_per_pos=(4,),
        acceptance_rate_per_pos=(1.0,),
        conditional_acceptance_rate_per_pos=(1.0,),
        accepted_histogram=(0, 4),
        by_output_position=(),
        num_rounds_off=0,
        num_draft_errors=0,
    ),
    stages=StageSeconds(prefill=0.1, draft=0.1, verify=0.5, sample=0.1, commit=0.1, idle=0.0, other=0.1),
    memory=MemoryRecord(peak=5, peak_of="process", weights=2, draft_head=1, cache=1),
    quality=Quality(accuracy=None, format_rate=1.0, completion_rate=1.0, loop_rate=0.0),
    requests=(REQUEST, replace(REQUEST, index=1)),
)


@pytest.fixture
def make_record() -> MakeRecord:
    """A record of a tree and repeat; `requests` are dicts of what differs in each from `REQUEST`."""

    def make(
        tree: str = "s3_k2_d6",
        *,
        repeat: int = 0,
        requests: Sequence[dict[str, Any]] = ({}, {}),
        error: str | None = None,
        **more: Any,
    ) -> SweepRecord:
        rows = tuple(replace(REQUEST, index=index, **fields) for index, fields in enumerate(requests))
        record = SweepRecord(
            schema=SCHEMA,
            point_id=f"{tree}:{repeat}",
            tree=tree,
            drafter="none" if tree == "off" else "auto",
            batch_size=1,
            temperature=0.0,
            dataset="gsm8k",
            arrival_rate=None,
            repeat=repeat,
            drafter_used=None,
            tree_file_hash=None,
            prompts_hash="sha256:0",
            setup=SETUP,
            environment=ENVIRONMENT,
            started_at="2026-01-01T00:00:00+00:00",
            error=error,
            results=None if error else replace(RESULTS, requests=rows),
        )
        return replace(record, **more)

    return make
