"""Results files with planted speeds."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from compressed_spec.measure.record import (
    NO_DRAFTER,
    SCHEMA,
    AcceptanceRecord,
    Environment,
    Latency,
    MemoryRecord,
    PositionBucket,
    Quality,
    RequestRecord,
    Results,
    Setup,
    StageSeconds,
    SweepRecord,
    Throughput,
)
from compressed_spec.tree import parse_tree

TOKENS = 64
SETUP = Setup(
    model="demo",
    checkpoint_hash="sha256:1",
    tokenizer_hash="sha256:2",
    num_requests=12,
    max_new_tokens=TOKENS,
    seed=0,
    top_p=1.0,
    top_k=0,
    min_p=0.0,
    repetition_penalty=1.0,
    verifier="auto",
    stop_rule="length",
    cache_policy="a row a request",
    prompt_format="raw",
    prompt_template=None,
    dtype="float32",
    weights=("F8_E4M3", "I8"),
    numerics="fast",
    compiled=False,
    device="cpu",
    arrivals="poisson",
    request_timeout=None,
    warmup_tokens=4,
    num_processes=1,
)
ENVIRONMENT = Environment(
    versions={"torch": "2.13"},
    git_revision="abc",
    platform="Linux",
    cpu="A processor",
    num_cores=2,
    num_threads=1,
    device_name="A processor",
    memory_bytes=2**33,
    argv=("compressed-spec", "sweep", "demo"),
)


def request(index: int, tokens_per_second: float, length: float, error: str | None) -> RequestRecord:
    rounds = max(round(TOKENS / length), 1)
    return RequestRecord(
        index=index,
        prompt_id=str(index),
        category=None,
        prompt_tokens=20,
        completion_tokens=0 if error else TOKENS,
        finish_reason="error" if error else "length",
        error=error,
        arrival=0.0,
        ttft_ms=None if error else 100.0,
        e2el_ms=None if error else 100.0 + 1e3 * TOKENS / tokens_per_second,
        prefill_seconds=0.1,
        decode_seconds=0.0 if error else (TOKENS - 1) / tokens_per_second,
        num_rounds=0 if error else rounds,
        num_draft_tokens=0 if error else 5 * rounds,
        num_accepted_tokens=0 if error else TOKENS - rounds,
        whole_rounds=0 if error else rounds,
        whole_tokens=0 if error else TOKENS,
        output_hash="sha256:3",
        correct=True,
        well_formed=True,
        looping=False,
    )


def results(tree: str, requests: Sequence[RequestRecord], batch_size: int) -> Results:
    shape = parse_tree(tree) if tree != "auto" else None
    depth = 0 if shape is None else shape.num_steps
    rounds, tokens = sum(one.num_rounds for one in requests), sum(one.completion_tokens for one in requests)
    accepted = sum(one.num_accepted_tokens for one in requests)
    per_pos = tuple(accepted // 2 ** (i + 1) for i in range(depth))
    seconds, failed = sum(one.decode_seconds for one in requests), sum(one.error is not None for one in requests)
    times = {
        f"{kind}_{name}_ms": 50.0 * (i + 1) * seconds
        for name in ("ttft", "tpot", "itl", "e2el")
        for i, kind in enumerate(("mean", "median", "std", "p90", "p95", "p99"))
    }
    return Results(
        throughput=Throughput(
            duration=seconds,
            completed=len(requests) - failed,
            failed=failed,
            timed_out=0,
            total_input_tokens=20 * len(requests),
            total_output_tokens=tokens,
            request_throughput=1.0,
            output_throughput=1.0,
            total_token_throughput=1.0,
            decode_throughput=1.0,
            max_concurrent_requests=batch_size,
            mean_concurrency=1.0,
        ),
        latency=Latency(**times),
        acceptance=AcceptanceRecord(
            num_rounds=rounds,
            num_draft_tokens=5 * rounds,
            num_accepted_tokens=accepted,
            acceptance_length=tokens / max(rounds, 1),
            mean_request_acceptance_length=tokens / max(rounds, 1),
            draft_acceptance_rate=0.4,
            candidates_per_round=0.0 if shape is None else shape.num_nodes - 1.0,
            num_accepted_tokens_per_pos=per_pos,
            acceptance_rate_per_pos=tuple(count / max(rounds, 1) for count in per_pos),
            conditional_acceptance_rate_per_pos=tuple(0.5 for _ in per_pos),
            accepted_histogram=(rounds,),
            by_output_position=(PositionBucket(start=0, num_rounds=rounds, num_tokens=tokens),),
            num_rounds_off=0,
            num_draft_errors=0,
        ),
        stages=StageSeconds(
            prefill=0.1, draft=0.3 * seconds, verify=0.6 * seconds, sample=0.05, commit=0.02, idle=0.0, other=0.01
        ),
        memory=MemoryRecord(peak=2**28, peak_of="process", weights=2**26, draft_head=2**22, cache=2**24),
        quality=Quality(accuracy=0.5, format_rate=0.9, completion_rate=0.4, loop_rate=0.0),
        requests=tuple(requests),
    )


@pytest.fixture(scope="session")
def sweep() -> Callable[..., list[SweepRecord]]:
    """Records of a sweep: `speeds[batch size][tree]` tokens a second of a request, each of them a little off."""

    def make(
        speeds: Mapping[int, Mapping[str, float]],
        *,
        datasets: Sequence[str] = ("gsm8k",),
        num_requests: int = 12,
        num_repeats: int = 2,
        noise: float = 0.02,
        seed: int = 0,
        failing: Sequence[str] = (),
        drafter: str = "auto",
        arrival_rate: float | None = None,
    ) -> list[SweepRecord]:
        rng = random.Random(seed)
        records = []
        for dataset in datasets:
            for batch_size, trees in speeds.items():
                # What makes a request slow for one tree does so for all.
                slowness = [rng.uniform(0.7, 1.3) for _ in range(num_requests)]
                for tree, speed in trees.items():
                    length = {"off": 1.0, "auto": 2.5}.get(tree) or 1.5 + 0.2 * int(tree.rpartition("d")[2])
                    for repeat in range(num_repeats):
                        requests = [
                            request(
                                i,
                                speed * slowness[i] * rng.gauss(1, noise),
                                length * rng.gauss(1, noise),
                                "It broke." if tree in failing and i == 3 else None,
                            )
                            for i in range(num_requests)
                        ]
                        records.append(
                            SweepRecord(
                                schema=SCHEMA,
                                point_id=f"{dataset}/{drafter}/{batch_size}/{tree}/{arrival_rate}/{repeat}",
                                tree=tree,
                                drafter=NO_DRAFTER if tree == "off" else drafter,
                                batch_size=batch_size,
                                temperature=0.0,
                                dataset=dataset,
                                arrival_rate=arrival_rate,
                                repeat=repeat,
                                tree_file_hash=None,
                                drafter_used=None if tree == "off" else "mtp",
                                prompts_hash=f"sha256:{dataset}",
                                setup=replace(SETUP, num_requests=num_requests),
                                environment=ENVIRONMENT,
                                started_at="2026-01-01T00:00:00+00:00",
                                error=None,
                                results=results(tree, requests, batch_size),
                            )
                        )
        return records

    return make


@pytest.fixture(scope="session")
def save() -> Callable[[Path, Sequence[SweepRecord]], Path]:
    """Write a results file."""

    def write(path: Path, records: Sequence[SweepRecord]) -> Path:
        path.write_text("".join(record.to_json() + "\n" for record in records), encoding="utf-8")
        return path

    return write
