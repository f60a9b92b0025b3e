"""Kernels compiled ahead of time. In processes of their own: here kernels may be interpreted, which none survives."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def compiling(*command: str) -> "subprocess.CompletedProcess[str]":
    """Python in an environment where kernels compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    environment["PYTHONWARNINGS"] = "ignore"
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def checked(*arguments: str) -> list[dict[str, Any]]:
    """Reports of `scripts/check_kernels.py`, which must find no fault."""
    result = compiling("scripts/check_kernels.py", *arguments, "--json")
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_cheap_kernels_compile_for_every_chip() -> None:
    reports = checked("norm_rope/kv", "compress/csa_entries", "indexer/scores_bf16")
    assert {report["capability"] for report in reports} == {80, 90, 100}
    cores = {report["capability"]: report["tensor_cores"] for report in reports if report["case"].startswith("indexer")}
    assert cores == {80: "mma.sync", 90: "wgmma.mma", 100: "tcgen05.mma"}


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_kernel_compiles_for_every_chip() -> None:
    reports = checked()
    assert all(report["registers"] <= 255 for report in reports)


FAULTY = """
from dataclasses import replace
from compressed_spec.kernels.triton_cases import norm_rope_cases
from compressed_spec.kernels.triton_compile import Chip, compile_case
case = {case.name: case for case in norm_rope_cases()}["norm_rope/width7168"]
spilling = replace(case, constexprs={**case.constexprs, "num_warps": 1})
for case, limit in ((spilling, 10**6), (case, 1000), (replace(case, tensor_cores=True), 10**6)):
    print(*compile_case(case, Chip(capability=90, shared_limit=limit)).faults, sep="|")
"""


def test_faults_are_seen() -> None:
    """A kernel that spills, one that needs more shared memory than there is, one that misses the tensor cores."""
    result = compiling("-c", FAULTY)
    assert result.returncode == 0, result.stderr
    spilled, shared, cores = result.stdout.splitlines()
    assert spilled.endswith("bytes a thread spilled")
    assert "shared memory, and a block has 1000" in shared
    assert cores == "no tensor-core instruction"


def test_interpreted_kernels_are_refused() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "scripts/check_kernels.py", "norm_rope"]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode != 0
    assert "unset TRITON_INTERPRET" in result.stderr


def test_launchers_launch_what_is_registered() -> None:
    result = compiling("tests/triton/launches.py")
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 30
