"""The sweep command on a small checkpoint: every field there and in agreement, failures kept, faults refused."""

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compressed_spec import generate, load_model
from compressed_spec.measure.record import SweepRecord
from compressed_spec.measure.results import read_results
from compressed_spec.noise import request_seed
from compressed_spec.text import load_tokenizer

TREES = "off,s{1..3}_k{1,2}_d{4},auto_s2_k2_d3"
MADE = ["off", "s3_k1_d4", "s2_k2_d4", "s3_k2_d4", "auto_s2_k2_d3"]
TOKENS = 14


def prompts_file(folder: Path, *texts: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(text)}\n" for text in texts))
    return path


def numbers(value: Any) -> Iterator[float]:
    """Every number in a tree of JSON."""
    if isinstance(value, dict):
        for one in value.values():
            yield from numbers(one)
    elif isinstance(value, list):
        for one in value:
            yield from numbers(one)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


@pytest.fixture(scope="module")
def swept(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> list[SweepRecord]:
    """A sweep in which one of five requests is too long for the model."""
    from compressed_spec.cli import main

    folder = tmp_path_factory.mktemp("sweep")
    prompts = prompts_file(folder, "One, two, three", "A tree of guesses", "word " * 600, "x", "The river was grey")
    out = folder / "results.jsonl"
    argv = ["sweep", str(tiny), "--dataset", str(prompts), "--output", str(out), "--requests", "5"]
    argv += ["--max-new-tokens", str(TOKENS)]
    main([*argv, "--trees", TREES, "--batch-sizes", "1,3"])
    main([*argv, "--trees", "off,s2_k2_d4", "--temperatures", "0.8", "--repeats", "2"])
    return read_results(out)


def test_one_line_a_point(swept: list[SweepRecord]) -> None:
    points = [(one.tree, one.batch_size, one.temperature, one.repeat) for one in swept]
    assert len(points) == len(set(points)) == len(MADE) * 2 + 2 * 2
    assert {one.tree for one in swept} == set(MADE)
    assert all(one.error is None for one in swept)
    assert {(one.tree == "off", one.drafter, one.drafter_used) for one in swept} == {
        (True, "none", None),
        (False, "auto", "MTPDrafter"),
    }


def test_tokens_are_those_of_plain_decoding(swept: list[SweepRecord], tiny: Path) -> None:
    model, tokenizer = load_model(tiny, progress=False), load_tokenizer(tiny)
    texts = ["One, two, three", "A tree of guesses", "x", "The river was grey"]
    prompts_ids = [tokenizer(text)["input_ids"] for text in texts]
    for temperature in (0.0, 0.8):
        seeds = [request_seed(0, index) for index in (0, 1, 3, 4)]
        plain = generate(
            model, prompts_ids, tree="off", temperature=temperature, seed=seeds, max_new_tokens=TOKENS, batch_size=1
        )
        wanted = [hashlib.sha256(np.array(one.token_ids, dtype="<i8").tobytes()).hexdigest() for one in plain]
        for record in swept:
            if record.temperature == temperature:
                assert record.results is not None
                ran = [one for one in record.results.requests if one.error is None]
                assert [one.output_hash for one in ran] == wanted
                assert [one.prompt_tokens for one in ran] == [len(ids) for ids in prompts_ids]
                assert [one.completion_tokens for one in ran] == [len(one.token_ids) for one in plain]
                assert [one.finish_reason for one in ran] == [one.finish_reason for one in plain]


def test_the_failed_request_is_kept(swept: list[SweepRecord]) -> None:
    for record in swept:
        assert record.results is not None
        failed = [one for one in record.results.requests if one.error is not None]
        assert [(one.index, one.finish_reason, one.completion_tokens, one.ttft_ms) for one in failed] == [
            (2, "error", 0, None)
        ]
        assert "512 positions" in str(failed[0].error)
        through = record.results.throughput
        assert (through.completed, through.failed, through.timed_out) == (4, 1, 0)


def test_times_agree(swept: list[SweepRecord]) -> None:
    for record in swept:
        assert record.results is not None
        one, requests = record.results, record.results.requests
        stages = one.stages
        assert stages.total == pytest.approx(one.throughput.duration)
        assert min(stages.prefill, stages.verify, stages.sample, stages.commit, stages.other) > 0
        assert stages.idle == 0
        assert stages.draft > 0
        shares = [(request.prefill_seconds, request.decode_seconds) for request in requests]
        assert sum(map(sum, shares)) == pytest.approx(one.throughput.duration)
        assert stages.prefill <= sum(prefill for prefill, _ in shares)
        tokens = sum(request.completion_tokens for request in requests)
        assert one.throughput.total_output_tokens == tokens
        assert one.throughput.output_throughput == pytest.approx(tokens / stages.total)
        assert one.throughput.request_throughput == pytest.approx(4 / stages.total)
        assert one.throughput.total_input_tokens == sum(r.prompt_tokens for r in requests if r.error is None)
        assert one.throughput.max_concurrent_requests == min(record.batch_size, 4)
        assert 0 < one.throughput.mean_concurrency <= record.batch_size + 1e-9
        if record.batch_size == 1:
            assert one.throughput.mean_concurrency == pytest.approx(1, abs=0.05)
        for request in requests:
            if request.error is None:
                assert 0 < request.ttft_ms <= request.e2el_ms <= 1e3 * stages.total  # type: ignore[operator]
        latency = one.latency
        for kind in ("ttft", "tpot", "itl", "e2el"):
            spread = [getattr(latency, f"{what}_{kind}_ms") for what in ("median", "p90", "p95", "p99")]
            assert spread == sorted(spread)
            assert spread[0] > 0
        whole = [r.e2el_ms for r in requests if r.e2el_ms is not None]
        assert latency.mean_e2el_ms == pytest.approx(sum(whole) / 4)
        assert latency.p95_e2el_ms == pytest.approx(np.percentile(whole, 95))
        per_token = [
            (r.e2el_ms - r.ttft_ms) / (r.completion_tokens - 1)
            for r in requests
            if r.e2el_ms is not None and r.ttft_ms is not None and r.completion_tokens > 1
        ]
        assert latency.mean_tpot_ms == pytest.approx(sum(per_token) / len(per_token))
        if record.tree == "off":  # a chunk is a token then
            assert latency.mean_itl_ms == pytest.approx(
                sum((r.e2el_ms or 0) - (r.ttft_ms or 0) for r in requests) / (tokens - 4)
            )


def test_counts_agree(swept: list[SweepRecord]) -> None:
    for record in swept:
        assert record.results is not None
        one, requests = record.results.acceptance, record.results.requests
        tokens = record.results.throughput.total_output_tokens
        assert one.num_rounds == sum(r.num_rounds for r in requests) == sum(one.accepted_histogram)
        assert one.num_accepted_tokens == sum(one.num_accepted_tokens_per_pos)
        assert one.num_accepted_tokens == sum(n * count for n, count in enumerate(one.accepted_histogram))
        assert one.num_accepted_tokens == sum(r.num_accepted_tokens for r in requests)
        assert one.num_draft_tokens == sum(r.num_draft_tokens for r in requests)
        # Four first tokens come from the prefill; a round gives what it accepts and, unless a stop cuts it, one more.
        assert tokens - 4 - one.num_rounds <= one.num_accepted_tokens <= tokens - 4
        for depth, count in enumerate(one.num_accepted_tokens_per_pos, start=1):
            assert count == sum(one.accepted_histogram[depth:])
            assert one.acceptance_rate_per_pos[depth - 1] == pytest.approx(count / one.num_rounds)
            before = one.num_rounds if depth == 1 else one.num_accepted_tokens_per_pos[depth - 2]
            assert one.conditional_acceptance_rate_per_pos[depth - 1] == pytest.approx(count / before)
        whole = sum(r.whole_rounds for r in requests)
        assert one.acceptance_length == pytest.approx(sum(r.whole_tokens for r in requests) / whole)
        assert sum(bucket.num_rounds for bucket in one.by_output_position) <= one.num_rounds
        if record.tree == "off":
            assert one.acceptance_length == 1.0
            assert one.num_draft_tokens == 0
        elif not record.tree.startswith("auto"):
            assert 1 < one.acceptance_length <= 4
            assert 0 < one.candidates_per_round <= 3
            assert one.draft_acceptance_rate == pytest.approx(one.num_accepted_tokens / one.num_draft_tokens)
        memory = record.results.memory
        assert memory.peak > memory.weights + memory.cache > memory.weights > memory.draft_head > 0
        assert record.results.quality.accuracy is None
        ends = sum(r.finish_reason == "stop" for r in requests)
        assert record.results.quality.completion_rate == ends / 4


def test_what_identifies_a_point_is_there(swept: list[SweepRecord], tiny: Path) -> None:
    for record in swept:
        assert record.setup.model == str(tiny)
        assert record.setup.checkpoint_hash.startswith("sha256:")
        assert record.setup.stop_rule == "EOS (token ids 1) or length"
        assert (record.setup.dtype, record.setup.numerics, record.setup.device) == ("float32", "fast", "cpu")
        assert "I8" in record.setup.weights  # FP4 pairs
        assert {"python", "torch", "transformers"} <= record.environment.versions.keys()
        assert record.environment.argv
        assert record.started_at.endswith("+00:00")
        raw = json.loads(record.to_json())
        assert all(abs(number) < float("inf") for number in numbers(raw))
    assert len({record.prompts_hash for record in swept}) == 1
    assert len({record.point_id for record in swept}) == len(swept)


Run = Callable[..., Any]


def test_summary_and_skipped_points(run: Run, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    argv = [
        "sweep",
        tiny,
        "--trees",
        "off,s{1..3}_k{1,2}_d{4}",
        "--requests",
        3,
        "--max-new-tokens",
        6,
        "--output",
        out,
    ]
    first = run(*argv)
    assert first.code == 0
    assert "4 points measured, 0 were there, 0 failed; 3 combinations make no tree" in first.err
    for word in ("off", "s3_k1_d4", "s2_k2_d4", "tokens a round", "tokens/s", "gain", "--repeats"):
        assert word in first.out
    content = out.read_bytes()
    out.write_bytes(content[:-30])
    again = run(*argv)
    assert "1 points measured, 3 were there" in again.err
    assert "removed a last line" in again.err
    assert len(read_results(out)) == 4
    assert out.read_bytes()[: len(content) // 2] == content[: len(content) // 2]
    more = run(*argv, "--dataset", "gsm8k,mbpp,spec_bench", "--trees", "off")
    assert "2 points measured, 1 were there" in more.err
    by_dataset = {one.dataset: one for one in read_results(out)}
    accuracies = {name: one.results and one.results.quality.accuracy for name, one in by_dataset.items()}
    assert accuracies == {"gsm8k": 0.0, "mbpp": None, "spec_bench": None}
    assert by_dataset["mbpp"].results is not None
    assert by_dataset["mbpp"].results.quality.format_rate == 0.0
    other_seed = run(*argv, "--trees", "off", "--seed", 1)
    assert "1 points measured, 0 were there" in other_seed.err


FLAKY = """
from pathlib import Path
from compressed_spec.drafting import NgramDrafter

class Flaky(NgramDrafter):
    def propose(self, *arguments, **named):
        if Path({flag!r}).exists():
            raise SystemError("the drafter is ill")
        return super().propose(*arguments, **named)

class Broken(NgramDrafter):
    def __init__(self):
        if Path({flag!r}).exists():
            raise ValueError("no drafter today")
        super().__init__()
"""


def test_a_failed_points_retry_takes_its_place(
    run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag, out = tmp_path / "flag", tmp_path / "results.jsonl"
    (tmp_path / "flaky_drafters.py").write_text(FLAKY.format(flag=str(flag)))
    monkeypatch.syspath_prepend(tmp_path)
    flag.touch()
    argv = ["sweep", tiny, "--requests", 2, "--max-new-tokens", 8, "--trees", "off,s3_k2_d6", "--output", out]
    argv += ["--drafters", "flaky_drafters:Broken,ngram"]
    first = run(*argv)
    assert first.code == 0
    assert "2 points measured, 0 were there, 1 failed" in first.err
    assert "no drafter today" in first.err
    before = read_results(out)
    assert [(one.drafter, one.error is None, one.results is None) for one in before] == [
        ("none", True, False),
        ("flaky_drafters:Broken", False, True),
        ("ngram", True, False),
    ]
    again = run(*argv)
    assert "0 points measured, 2 were there, 1 failed" in again.err
    flag.unlink()
    last = run(*argv)
    assert "1 points measured, 2 were there, 0 failed" in last.err
    after = read_results(out)
    assert [one.error for one in after] == [None] * 3
    assert [one.point_id for one in after] == [one.point_id for one in before]
    assert [after[0], after[2]] == [before[0], before[2]]


def test_where_every_point_fails(run: Run, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    prompts = prompts_file(tmp_path, "word " * 600)
    ran = run("sweep", tiny, "--dataset", prompts, "--requests", 1, "--trees", "off", "--output", out)
    assert ran.code == 2
    assert "512 positions" in ran.err
    assert read_results(out)[0].error is not None


def test_a_drafter_that_fails_in_rounds_is_counted(
    run: Run, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag, out = tmp_path / "flag", tmp_path / "results.jsonl"
    (tmp_path / "ill_drafters.py").write_text(FLAKY.format(flag=str(flag)))
    monkeypatch.syspath_prepend(tmp_path)
    flag.touch()
    run("sweep", tiny, "--requests", 2, "--max-new-tokens", 5, "--trees", "s2_k1_d3", "--output", out, "--drafters",
        "ill_drafters:Flaky")  # fmt: skip
    (record,) = read_results(out)
    assert record.results is not None
    assert record.results.acceptance.num_draft_errors > 0


def test_open_loop(run: Run, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    argv = ["sweep", tiny, "--requests", 4, "--max-new-tokens", 4, "--trees", "off,s2_k1_d3", "--output", out]
    ran = run(*argv, "--arrival-rate", "5,1000", "--arrivals", "uniform", "--batch-sizes", 2)
    assert ran.code == 0
    assert "5 requests/s" in ran.out
    for record in read_results(out):
        assert record.results is not None
        assert record.arrival_rate is not None
        arrivals = [one.arrival for one in record.results.requests]
        assert arrivals == pytest.approx([n / record.arrival_rate for n in range(4)])
        assert record.results.throughput.duration > arrivals[-1]
        assert record.results.stages.total == pytest.approx(record.results.throughput.duration)
        assert (record.results.stages.idle > 0) == (record.arrival_rate == 5)


def test_timeouts(run: Run, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    run("sweep", tiny, "--requests", 2, "--max-new-tokens", 50, "--trees", "off", "--output", out, "--ignore-eos",
        "--request-timeout", 1e-9)  # fmt: skip
    (record,) = read_results(out)
    assert record.results is not None
    assert [one.finish_reason for one in record.results.requests] == ["timeout"] * 2
    assert [one.error for one in record.results.requests] == [None] * 2
    assert record.results.throughput.timed_out == 2
    assert record.results.throughput.completed == 0
    assert record.setup.stop_rule == "length alone"


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (["--trees", "s3_k2"], "s3_k2"),
        (["--trees", "s{2..3"], "not closed"),
        (["--batch-sizes", "0"], "--batch-sizes"),
        (["--batch-sizes", "4", "--requests", "3"], "--requests"),
        (["--requests", "65"], "gsm8k:FILE"),
        (["--requests", "0"], "--requests"),
        (["--repeats", "0"], "--repeats"),
        (["--max-new-tokens", "0"], "--max-new-tokens"),
        (["--temperatures", "-1"], "--temperatures"),
        (["--arrival-rate", "0"], "--arrival-rate"),
        (["--dataset", "nonsense"], "nonsense"),
        (["--verifier", "nonsense"], "nonsense"),
        (["--top-p", "0"], "top_p"),
        (["--prompt-format", "template"], "--prompt-format"),
        (["--warmup-tokens", "-1"], "--warmup-tokens"),
        (["--output", "/nowhere/at/all.jsonl"], "cannot be written"),
    ],
)
def test_faults_are_refused_before_anything_runs(
    run: Run, tiny: Path, tmp_path: Path, options: list[str], part: str
) -> None:
    out = tmp_path / "results.jsonl"
    ran = run("sweep", tiny, "--output", out, *options)
    assert ran.code == 2
    assert ran.out == ""
    assert ran.err.startswith("compressed-spec: ")
    assert ran.err.count("\n") == 1
    assert part in ran.err
    assert not out.exists()


def test_another_models_file_grows_and_a_foreign_one_is_left_alone(run: Run, tiny: Path, tmp_path: Path) -> None:
    notes = tmp_path / "notes.txt"
    notes.write_text("notes")
    ran = run("sweep", tiny, "--output", notes, "--requests", 1)
    assert ran.code == 2
    assert "notes.txt" in ran.err
    assert notes.read_text() == "notes"
