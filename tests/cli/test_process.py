"""The command line as a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path


def shell(command: str, **more: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PY": sys.executable, **more}
    return subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, env=environment, check=False
    )


def test_a_process_that_is_refused_ends_with_2(tmp_path: Path) -> None:
    ran = shell('"$PY" -m compressed_spec generate "$MODEL" --prompt hi', MODEL=str(tmp_path / "none"))
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1
    assert "none does not exist" in ran.stderr


def test_the_installed_command_prints_json_only(tiny: Path) -> None:
    command = '"$(dirname "$PY")/compressed-spec" generate "$MODEL" - --json --max-new-tokens 4 <<< "One, two"'
    ran = shell(command, MODEL=str(tiny))
    assert ran.returncode == 0
    assert len(json.loads(ran.stdout)["token_ids"]) == 4


def test_a_reader_that_leaves_early_is_no_fault(tiny: Path) -> None:
    """Pipes that close after the first line, and before anything is written."""
    command = '"$PY" -m compressed_spec inspect "$MODEL"'
    ran = shell(f"{command} | head -1; {command} --json | true", MODEL=str(tiny))
    assert ran.stdout.startswith("checkpoint")
    assert ran.stderr == ""
