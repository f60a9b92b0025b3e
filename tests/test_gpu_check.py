"""The GPU script, run small on the CPU: it must work the first time that it meets a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.slow
def test_dry_run(tmp_path: Path) -> None:
    output = tmp_path / "results.json"
    command = [sys.executable, "scripts/gpu_check.py", "--dry-run", "--output", str(output)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        command, cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    results = json.loads(output.read_text())
    assert all(one["passed"] for one in results["parity"])
    assert len({one["op"] for one in results["parity"]}) == len(results["parity"]) > 12
    assert results["transformers"]["passed"]
    assert results["transformers"]["scale"] > 1e-2
    assert len(results["texts"]) == 4
    assert not any(results["texts"].values())
    assert len(results["steps"]) == results["steps_wanted"]
    assert {one["form"] for one in results["steps"]} == {"chain", "tree"}
    assert {one["kernel"].split("/")[0] for one in results["kernels"]} >= {
        "fp8_linear",
        "fp4_experts",
        "sparse_attention",
        "hyper_connection",
        "coupled_tokens",
    }
    for name in ("sparse_attention", "kernels", "steps"):
        assert name in result.stdout


def test_refuses_without_a_gpu() -> None:
    code = (
        "import runpy, torch; torch.cuda.is_available = lambda: False\nrunpy.run_path('scripts/gpu_check.py')['main']()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "--dry-run" in result.stderr
    assert "Traceback" not in result.stderr
