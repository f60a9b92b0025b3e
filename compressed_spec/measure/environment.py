"""What ran a measurement: versions, revision, machine, and which checkpoint."""

import hashlib
import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from compressed_spec.measure.identity import command_line, git_revision, num_cpus, processor, versions
from compressed_spec.measure.record import Environment

_PACKAGES = ("compressed-spec", "torch", "triton", "transformers", "tokenizers", "safetensors", "numpy")
_WHOLE_BYTES = 1 << 30  # a checkpoint up to this size is hashed whole: seconds
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16


def environment(device: torch.device, argv: Sequence[str]) -> Environment:
    """This process's."""
    cpu = processor() or platform.machine()
    num_pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    on_gpu = device.type == "cuda"
    return Environment(
        versions={name: found for name, found in versions(_PACKAGES).items() if found is not None},
        git_revision=git_revision("-dirty"),
        platform=platform.platform(),
        cpu=cpu,
        num_cores=num_cpus(),
        num_threads=torch.get_num_threads(),
        device_name=torch.cuda.get_device_name(device) if on_gpu else cpu,
        memory_bytes=torch.cuda.mem_get_info(device)[1] if on_gpu else num_pages * page_bytes,
        argv=tuple(command_line(argv)),  # the program by its name: where it lies says nothing of the run
    )


def checkpoint_hash(folder: Path) -> str:
    """Of weights and configuration: "sha256:...", or "sha256-sampled:..." of a large checkpoint, whose shards are read
    at 64 places each."""
    shards = sorted(folder.glob("*.safetensors"))
    whole = sum(shard.stat().st_size for shard in shards) <= _WHOLE_BYTES
    digest = hashlib.sha256()
    for path in [folder / "config.json", folder / "generation_config.json", *shards]:
        if path.is_file():
            digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
            for block in _blocks(path, whole=whole or path.suffix == ".json"):
                digest.update(block)
    return f"{'sha256' if whole else 'sha256-sampled'}:{digest.hexdigest()}"


def tokenizer_hash(folder: Path) -> str:
    """Of the tokenizer, its settings and chat template."""
    digest = hashlib.sha256()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (folder / name).is_file():
            digest.update(f"{name}\0".encode() + (folder / name).read_bytes())
    return f"sha256:{digest.hexdigest()}"


def _blocks(path: Path, *, whole: bool) -> Iterable[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if whole or size <= _NUM_SAMPLES * _SAMPLE_BYTES:
            while block := file.read(1 << 20):
                yield block
            return
        for i in range(_NUM_SAMPLES):  # the first holds the header, the last the end
            file.seek(i * (size - _SAMPLE_BYTES) // (_NUM_SAMPLES - 1))
            yield file.read(_SAMPLE_BYTES)
