"""`inspect --tp`: what a process needs, told without a checkpoint."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[1] / "data"
FLASH = ("--config", DATA / "configs" / "v4_flash.json", "--manifest", DATA / "tensor_lists" / "v4_flash.tsv.gz")
SEQUENCES = ("--batch-size", 64, "--context", 131072, "--dtype", "bfloat16")


def test_a_process_of_eight(run: Callable[..., Any]) -> None:
    ran = run("inspect", *FLASH, "--tp", 8, *SEQUENCES, "--json", "--memory", 80)
    found = json.loads(ran.out)
    needs = found["needs"]
    assert (found["num_tensors"], found["weight_bytes"], found["draft_head"]) == (69_187, 159_609_485_896, "mtp")
    assert round(needs["stored_bytes"] / 2**30, 1) == 20.4
    assert needs["possible"] == [1, 2, 4, 8]
    # 6,880 bytes a token, and windows of 128 rows and half-filled windows a sequence, on every process.
    entries = 64 * 131072 * (21 * (512 + 128) * 2 // 4 + 20 * 512 * 2 // 128)
    windows = 64 * 44 * 128 * 512 * 2
    buffers = 64 * 4 * 2 * (21 * 8 * 2 * (512 + 128) + 20 * 128 * 512)
    pending = 64 * 4 * 4096 * 2
    assert needs["cache_bytes"] == entries + windows + buffers + pending
    assert needs["cache_bytes"] + needs["scratch_bytes"] == found["cache_bytes"]
    assert ran.code == 2
    (problem,) = found["problems"]
    assert problem.startswith("each of 8 processes needs 126.4 GiB but a device has 80.0 GiB: use fewer sequences")
    assert ran.err.startswith("compressed-spec: 1 problem found in ")


@pytest.mark.parametrize(("memory", "code"), [(54, 2), (56, 0)])
def test_what_fits_is_no_problem(run: Callable[..., Any], tiny: Path, memory: float, code: int) -> None:
    ran = run("inspect", tiny, "--tp", 2, "--batch-size", 64, "--max-length", 512, "--json")
    needs = json.loads(ran.out)["needs"]
    total = needs["weight_bytes"] + needs["cache_bytes"] + needs["scratch_bytes"]
    share = memory / 55
    ran = run("inspect", tiny, "--tp", 2, "--batch-size", 64, "--max-length", 512, "--memory", total / 2**30 * share)
    assert ran.code == code
    assert ("each of 2 processes needs" in ran.out) == (code == 2)
    assert "1, 2 can share this model" in ran.out
