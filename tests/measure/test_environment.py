"""Hashes that notice a changed byte, and memory peaks that belong to their stretch of work."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from compressed_spec.measure import environment as module
from compressed_spec.measure.environment import checkpoint_hash, environment, tokenizer_hash
from compressed_spec.measure.memory import PeakMemory
from compressed_spec.models.deepseek_v4.load import DEMO


def test_a_changed_byte_changes_the_hash(tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO, tmp_path / "copy")
    before = checkpoint_hash(folder), tokenizer_hash(folder)
    assert before == (checkpoint_hash(DEMO), tokenizer_hash(DEMO))
    assert all(one.startswith("sha256:") for one in before)
    shard = sorted(folder.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[len(data) // 3] ^= 1
    shard.write_bytes(data)
    assert checkpoint_hash(folder) != before[0]
    assert tokenizer_hash(folder) == before[1]
    (folder / "tokenizer_config.json").write_text("{}")
    assert tokenizer_hash(folder) != before[1]


def test_a_large_checkpoint_is_sampled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WHOLE_BYTES", 1 << 10)
    monkeypatch.setattr(module, "_SAMPLE_BYTES", 1 << 6)
    shard = tmp_path / "model.safetensors"
    data = np.random.default_rng(0).integers(0, 256, size=1 << 16, dtype=np.uint8)
    shard.write_bytes(data.tobytes())
    before = checkpoint_hash(tmp_path)
    assert before.startswith("sha256-sampled:")
    for place in (0, -1):  # header and end are always read
        changed = data.copy()
        changed[place] ^= 1
        shard.write_bytes(changed.tobytes())
        assert checkpoint_hash(tmp_path) != before
    shard.write_bytes((data ^ 1).tobytes())
    assert checkpoint_hash(tmp_path) != before
    shard.write_bytes(data.tobytes() + b"x")
    assert checkpoint_hash(tmp_path) != before


def test_the_environment_is_this_process() -> None:
    found = environment(torch.device("cpu"), ["sweep", "demo"])
    assert found.argv == ("sweep", "demo")
    assert found.versions["torch"] == torch.__version__
    assert found.num_threads == torch.get_num_threads()
    assert found.memory_bytes > 1 << 28
    assert found.device_name == found.cpu != ""


def test_a_peak_is_of_its_own_stretch() -> None:
    big = 300 << 20
    watch = PeakMemory(torch.device("cpu"))
    before = watch.peak()
    block = torch.ones(big // 4)
    del block
    after = watch.peak()
    assert after.num_bytes >= before.num_bytes + 0.9 * big
    fresh = PeakMemory(torch.device("cpu")).peak()
    if fresh.of == "process":  # elsewhere a peak stays
        assert fresh.num_bytes < after.num_bytes - 0.5 * big
