"""Loading takes the memory of the process's own weights and little more, at any size; what does not fit is refused."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import compressed_spec.memory as memory
from compressed_spec import load_model
from compressed_spec.layout import CacheShape
from compressed_spec.memory import check_fits, human_bytes
from compressed_spec.models.deepseek_v4.config import parse_config
from compressed_spec.models.deepseek_v4.manifest import stored_tensors
from compressed_spec.models.deepseek_v4.names import DraftHeadKind
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint
from compressed_spec.testing.models import random_model
from compressed_spec.testing.sparse import write_sparse_checkpoint

DATA = Path(__file__).parents[1] / "data"
SCRIPT = Path(__file__).parent / "load_part.py"
MEDIUM: dict[str, Any] = {
    "hidden_size": 1024,
    "vocab_size": 65536,
    "moe_intermediate_size": 512,
    "n_routed_experts": 32,
    "num_hidden_layers": 2,
    "compress_ratios": [0, 4, 0],
}
SHALLOW: dict[str, Any] = {"num_hidden_layers": 2, "compress_ratios": [0, 4, 0], "n_routed_experts": 8}
needs_linux = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from Linux's /proc")


def load_part(folder: Path, *options: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), *options], capture_output=True, text=True, check=True, timeout=800
    )
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def sparse(folder: Path, *, experts: str = "fp4", **overrides: object) -> Path:
    """A checkpoint of holes. With FP8 experts scales are F32, and every one of them reads as zero."""
    raw = json.loads((DATA / "configs" / "v4_flash.json").read_text()) | overrides
    return write_sparse_checkpoint(folder, raw, stored_tensors(parse_config(raw), DraftHeadKind.MTP, experts=experts))


@needs_linux
def test_a_part_takes_its_weights_and_two_tensors(tmp_path: Path) -> None:
    folder = sparse(tmp_path, **MEDIUM)
    found = load_part(folder, "--rank", "1", "--size", "2")
    assert found["weights"] > 400 << 20
    assert found["peak"] <= found["weights"] + sum(found["largest"])
    # Of the pages of the mapped files, which count as this process's, few stay: they are larger than what is left.
    assert sum(path.stat().st_size for path in folder.iterdir()) > 3 * sum(found["largest"])


@needs_linux
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_full_size_checkpoint_goes_through_the_loader(tmp_path: Path) -> None:
    """All of a rank's 20 GiB of V4-Flash are read, from a file of holes, and checked; nothing is kept."""
    folder = sparse(tmp_path)
    assert sum(path.stat().st_size for path in folder.iterdir()) > 159_609_485_896
    assert sum(path.stat().st_blocks * 512 for path in folder.iterdir()) < 64 << 20
    found = load_part(folder, "--rank", "3", "--size", "8", "--device", "meta")
    assert round(found["weights"] / 2**30, 1) == 71.4
    assert found["peak"] < 512 << 20


def test_T36_weights_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_checkpoint(tmp_path, compress_ratios=(0,))
    monkeypatch.setattr(memory, "_system_free", lambda: 1000)
    with pytest.raises(
        ValueError, match=r"A model of .* does not fit into the 1000 B that are free in the memory of 'cpu'"
    ):
        load_model(folder, progress=False)


def test_T36_a_cache_that_would_not_fit_beside_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused before any weight is read: a broken scale is only found if there is room."""
    folder = sparse(tmp_path, experts="fp8", hidden_size=128, moe_intermediate_size=128, vocab_size=256, **SHALLOW)
    monkeypatch.setattr(memory, "_system_free", lambda: 1 << 30)
    small, large = (
        CacheShape(batch_size=1, max_length=length, max_nodes=1, prefill_chunk=1, max_draft_nodes=1)
        for length in (64, 1 << 20)
    )
    with pytest.raises(ValueError, match=r"A model with its cache of .* does not fit .*: take fewer sequences"):
        load_model(folder, progress=False, room_for=large)
    with pytest.raises(ValueError, match="holds a scale that is not"):
        load_model(folder, progress=False, room_for=small)


def test_T36_a_cache_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model((0, 4))
    monkeypatch.setattr(memory, "_system_free", lambda: 1 << 20)
    model.new_cache(max_length=32, max_nodes=2, prefill_chunk=2)

    def reserved(*size: object, **options: object) -> torch.Tensor:
        raise AssertionError("nothing may be taken before it is known to fit")

    monkeypatch.setattr(torch, "full", reserved)
    with pytest.raises(ValueError, match=r"A cache of .* MiB does not fit into the 1\.0 MiB .*: lower batch_size"):
        model.new_cache(max_length=2048, batch_size=64)


def test_free_memory_is_the_container_s_where_it_is_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_system_free", lambda: 5000)
    assert memory.free_bytes(torch.device("cpu")) == 5000
    for name, text in (
        ("memory.max", "4000"),
        ("memory.current", "3000"),
        ("memory.stat", "inactive_file 200\nanon 7"),
    ):
        (tmp_path / name).write_text(f"{text}\n")
    assert memory.free_bytes(torch.device("cpu")) == 1200
    check_fits("It", 1200, torch.device("cpu"), "-")
    with pytest.raises(ValueError, match=r"It of 1\.2 KiB does not fit into the 1\.2 KiB"):
        check_fits("It", 1201, torch.device("cpu"), "-")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_bytes(torch.device("cpu")) == 5000
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "missing")
    monkeypatch.undo()
    assert memory.free_bytes(torch.device("meta")) is None


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (20 << 20, "20.0 MiB"),
        (3 << 30, "3.0 GiB"),
        (5 << 40, "5.0 TiB"),
    ],
)
def test_bytes_for_people(num_bytes: int, text: str) -> None:
    assert human_bytes(num_bytes) == text
