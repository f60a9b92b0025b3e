"""Sweeps in processes of their own, killed at random moments."""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from compressed_spec.measure.record import SweepRecord
from compressed_spec.measure.results import read_results

TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m")
# What a clock says, and the command line, which names another output.
TIMED_REQUEST = ("arrival", "ttft_ms", "e2el_ms", "prefill_seconds", "decode_seconds")
COUNTED = ("completed", "failed", "timed_out", "total_input_tokens", "total_output_tokens", "max_concurrent_requests")


def without_times(record: SweepRecord) -> dict[str, Any]:
    """All of a record that two runs of the same sweep share."""
    assert record.results is not None
    raw = asdict(record)
    del raw["started_at"], raw["environment"]["argv"]
    raw["results"] = {
        "throughput": {name: getattr(record.results.throughput, name) for name in COUNTED},
        "acceptance": asdict(record.results.acceptance),
        "quality": asdict(record.results.quality),
        "cache": record.results.memory.cache,
        "requests": [
            {name: value for name, value in asdict(request).items() if name not in TIMED_REQUEST}
            for request in record.results.requests
        ],
    }
    return raw


def victim(process: subprocess.Popen[bytes], rng: random.Random) -> int:
    """The process itself, or one of those that it has started and looks after."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return rng.choice([int(pid) for pid in children]) if len(children) > 1 else process.pid


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("launcher", "num_kills"), [((), 10), (TORCHRUN, 3)], ids=["alone", "torchrun"])
def test_killed_at_random_moments_and_resumed_equals_an_undisturbed_sweep(
    tiny: Path, tmp_path: Path, launcher: tuple[str, ...], num_kills: int
) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed.jsonl", tmp_path / "disturbed.jsonl"

    def start(out: Path) -> subprocess.Popen[bytes]:
        argv = ["sweep", str(tiny), "--dataset", "gsm8k,mbpp", "--trees", "off,s{2..4}_k{1,2}_d{3..5}"]
        argv += ["--batch-sizes", "1,2", "--requests", "4", "--max-new-tokens", "12", "--repeats", "2"]
        return subprocess.Popen(
            [sys.executable, "-m", *launcher, "compressed_spec", *argv, "--output", str(out)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    began = time.monotonic()
    assert start(undisturbed).wait() == 0
    seconds = time.monotonic() - began
    wanted = read_results(undisturbed)
    rng = random.Random(0)
    kills, sizes = 0, []
    while kills < num_kills:
        before = disturbed.stat().st_size if disturbed.exists() else 0
        process = start(disturbed)
        # It may be importing, loading, decoding or writing: from the first line that this run adds, some moments more.
        while (not disturbed.exists() or disturbed.stat().st_size <= before) and process.poll() is None:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, seconds / (4 * num_kills)))
        if process.poll() is not None:  # done early: the sweep was too short to be killed so often
            break
        os.kill(victim(process, rng), signal.SIGKILL)
        process.wait(timeout=60)
        kills += 1
        sizes.append(len(read_results(disturbed)))
    assert kills == num_kills
    assert sizes == sorted(sizes)
    assert sizes[-1] < len(wanted)
    assert start(disturbed).wait() == 0
    found = read_results(disturbed)
    assert [without_times(record) for record in found] == [without_times(record) for record in wanted]
    assert sorted(os.listdir(tmp_path)) == [disturbed.name, undisturbed.name]
