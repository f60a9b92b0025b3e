"""Checkpoints of any size that take no room on disk: true headers, and holes where the data would be."""

import json
from collections.abc import Mapping
from pathlib import Path

from compressed_spec.models.deepseek_v4.safetensors_folder import INDEX_NAME, TensorInfo


def write_sparse_checkpoint(folder: Path, raw_config: Mapping[str, object], tensors: Mapping[str, TensorInfo]) -> Path:
    """Write config, index and one shard a layer; every value reads as zero, an E8M0 scale as 2 ** -127."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw_config))
    shards: dict[str, list[str]] = {}
    for name in tensors:
        parts = name.split(".")
        shards.setdefault(".".join(parts[:2]) if parts[0] in ("layers", "mtp") else "rest", []).append(name)
    weight_map = {name: f"{shard}.safetensors" for shard, names in shards.items() for name in names}
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    for shard, names in shards.items():
        header, end = {}, 0
        for name in names:
            info, begin = tensors[name], end
            end += info.nbytes
            header[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with (folder / f"{shard}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    return folder
