"""However one process ends, all of them do, within half a minute, with the cause on stderr and nobody left behind."""

import json
import os
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint
from compressed_spec.testing.parallel import Ended, finish, free_port, start

HERE = Path(__file__).parent
ENDLESS = str(HERE / "endless.py")
SECONDS = 30
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), compress_ratios=(0, 4))


Started = list[subprocess.Popen[str]]


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """Every process that a test starts, for a failed one to leave none behind."""
    found: Started = []

    class Known(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options | {"start_new_session": True})
            found.append(self)

    monkeypatch.setattr(subprocess, "Popen", Known)
    yield found
    for process in found:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def popen(argv: Sequence[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def pids(runs: Sequence[subprocess.Popen[str]], count: int) -> list[int]:
    """Process ids of `count` workers a run, once they decode."""
    found = []
    for run in runs:
        assert run.stdout is not None
        found += [int(run.stdout.readline().removeprefix("pid ")) for _ in range(count)]
    time.sleep(1.0)  # they are in the middle of rounds
    return found


def ended(run: subprocess.Popen[str]) -> Ended:
    (one,) = finish([run], seconds=SECONDS)
    return one


def assert_gone(workers: Sequence[int]) -> None:
    deadline = time.monotonic() + SECONDS
    while alive := [pid for pid in workers if is_alive(pid)]:
        assert time.monotonic() < deadline, alive
        time.sleep(0.2)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_killed_process_under_torchrun(folder: Path) -> None:
    run = popen([*TORCHRUN, "--standalone", "--nproc-per-node", "2", ENDLESS, str(folder)])
    workers = pids([run], 2)
    os.kill(workers[1], signal.SIGKILL)
    one = ended(run)
    assert one.code != 0
    assert "Signal 9 (SIGKILL)" in one.err
    assert_gone(workers)


def test_a_killed_process_that_nobody_looks_after(folder: Path) -> None:
    runs = start([sys.executable, ENDLESS, str(folder)], 2, environment={"OMP_NUM_THREADS": "1"})
    pids(runs, 1)
    runs[1].kill()
    first, killed = finish(runs, seconds=SECONDS)
    assert killed.code == -signal.SIGKILL
    assert first.code != 0
    assert "Another process of this run is gone" in first.err


def test_a_process_that_falls_silent(folder: Path) -> None:
    """Nothing tells the others: no connection closes. Only its beat stops."""
    runs = start([sys.executable, ENDLESS, str(folder)], 2, environment={"OMP_NUM_THREADS": "1"})
    pids(runs, 1)
    runs[1].send_signal(signal.SIGSTOP)
    try:
        (first,) = finish(runs[:1], seconds=SECONDS)
    finally:
        runs[1].kill()
        runs[1].communicate()
    assert first.code == 1
    assert "rank 0 ends because of another process: rank 1 has not been heard of for 15 s" in first.err


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_raises(folder: Path, rank: int) -> None:
    argv = [sys.executable, ENDLESS, str(folder), "--raising-rank", str(rank), "--raise", "a fault of its own"]
    both = finish(start(argv, 2, environment={"OMP_NUM_THREADS": "1"}), seconds=SECONDS + 30)
    assert [one.code for one in both] == [1, 1]
    assert "ValueError: a fault of its own" in both[rank].err
    assert "Another process of this run is gone" in both[1 - rank].err or "a fault of its own" in both[1 - rank].err


def test_ctrl_c(folder: Path) -> None:
    run = popen([*TORCHRUN, "--standalone", "--nproc-per-node", "2", ENDLESS, str(folder)])
    workers = pids([run], 2)
    os.killpg(run.pid, signal.SIGINT)  # as a terminal does: to torchrun and all workers
    one = ended(run)
    assert one.code != 0
    assert "KeyboardInterrupt" in one.err or "SIGINT" in one.err or "Signal 2" in one.err
    assert_gone(workers)


def test_torchrun_is_asked_to_end(folder: Path) -> None:
    run = popen([*TORCHRUN, "--standalone", "--nproc-per-node", "2", ENDLESS, str(folder)])
    workers = pids([run], 2)
    run.send_signal(signal.SIGTERM)
    assert ended(run).code != 0
    assert_gone(workers)


def test_workers_whose_torchrun_is_killed(folder: Path) -> None:
    run = popen([*TORCHRUN, "--standalone", "--nproc-per-node", "2", ENDLESS, str(folder)])
    workers = pids([run], 2)
    run.kill()
    assert "the process that keeps the run together is gone" in ended(run).err
    assert_gone(workers)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with closing(socket.socket()) as taken:
        taken.bind(("", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_a_port_that_is_in_use_under_torchrun(folder: Path, taken_port: int) -> None:
    address = ["--master-addr", "127.0.0.1", "--master-port", str(taken_port)]
    one = ended(popen([*TORCHRUN, "--nproc-per-node", "2", *address, ENDLESS, str(folder)]))
    assert one.code != 0
    assert "EADDRINUSE" in one.err or "address already in use" in one.err.lower()


def test_a_port_that_is_in_use_without_torchrun(folder: Path, taken_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0"), ("GROUP_RANK", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(taken_port))
    one = ended(popen([sys.executable, "-m", "compressed_spec", "generate", str(folder), "--prompt", "a"]))
    assert one.code == 2
    (line,) = [line for line in one.err.splitlines() if line.startswith("compressed-spec: ")]
    assert f"The run's store at 127.0.0.1:{taken_port} cannot be used" in line
    assert "choose another --master-port" in line


def test_one_progress_bar(folder: Path) -> None:
    """On a terminal, which both processes write to, the first alone shows how far loading is."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    argv = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "compressed_spec", "generate", str(folder)]
    run = subprocess.Popen([*argv, "--prompt", "a", "--max-new-tokens", "2"], stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    said = b""
    with open(ours, "rb", buffering=0) as terminal, suppress(OSError):  # Linux's way to say that all writers are gone
        while part := terminal.read(4096):
            said += part
    assert run.wait(timeout=SECONDS) == 0
    assert said.count(b"loading weights:   0%") == 1


def two_nodes(folders: Sequence[Path], *options: str) -> list[subprocess.Popen[str]]:
    """A torchrun a node, one process each; the nodes differ in the folder that they have."""
    port = str(free_port())
    return [
        popen(
            [
                *TORCHRUN,
                *("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"),
                *("--master-addr", "127.0.0.1", "--master-port", port, "-m", "compressed_spec"),
                *("generate", str(folder), "--prompt", "hello", "--max-new-tokens", "6", *options),
            ]
        )
        for node, folder in enumerate(folders)
    ]


def test_two_nodes(folder: Path) -> None:
    first, second = finish(two_nodes([folder, folder], "--json"), seconds=120)
    assert (first.code, second.code, second.out) == (0, 0, ""), (first.err, second.err)
    argv = [sys.executable, "-m", "compressed_spec", "generate", str(folder), "--prompt", "hello"]
    alone = subprocess.run([*argv, "--max-new-tokens", "6", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(first.out)["token_ids"] == json.loads(alone.stdout)["token_ids"]
    assert json.loads(first.out)["stats"]["num_rounds"] == json.loads(alone.stdout)["stats"]["num_rounds"]


def test_a_shard_that_is_missing_on_one_node(folder: Path, tmp_path: Path) -> None:
    other = make_tiny_checkpoint(tmp_path, compress_ratios=(0, 4))
    (gone,) = other.glob("model-00003-of-*.safetensors")
    gone.unlink()
    first, second = finish(two_nodes([folder, other]), seconds=120)
    assert first.code != 0
    assert second.code != 0
    assert f"{gone.name} is missing from" in first.err, "the first process speaks for all"
    assert f"{gone.name} is missing from" in second.err, "and the one that misses it for itself"
    assert "rank 1 on " in first.err


def test_nodes_with_different_checkpoints(folder: Path, tmp_path: Path) -> None:
    other = make_tiny_checkpoint(tmp_path, compress_ratios=(0, 4), routed_scaling_factor=2.5)
    first, second = finish(two_nodes([folder, other]), seconds=120)
    assert first.code != 0
    assert second.code != 0
    assert "The processes disagree about the checkpoint: 1 of 2 differ" in first.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_devices_that_are_not_there(folder: Path) -> None:
    argv = [*TORCHRUN, "--standalone", "--nproc-per-node", "2", "-m", "compressed_spec", "generate", str(folder)]
    (one,) = finish([popen([*argv, "--prompt", "a", "--device", "cuda"])], seconds=60)
    assert one.code != 0
    assert "Device 'cuda:" in one.err
    assert "start one process a GPU on each node" in one.err


def test_a_number_of_processes_that_does_not_divide(folder: Path) -> None:
    argv = [*TORCHRUN, "--standalone", "--nproc-per-node", "3", "-m", "compressed_spec", "generate", str(folder)]
    (one,) = finish([popen([*argv, "--prompt", "a"])], seconds=120)
    assert one.code != 0
    said = [line for line in one.err.splitlines() if line.startswith("compressed-spec: ")]
    assert len(said) == 1
    assert "3 processes cannot share this model evenly" in said[0]
    assert said[0].endswith("use one of 1, 2.")
