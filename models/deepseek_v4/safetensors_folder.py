"""What a folder of safetensors files holds, read from its JSON index and the files' headers alone.

A safetensors file is 8 bytes of header length (little endian), a JSON header, then the tensors' bytes, in one piece.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# Bytes an element; dtypes that no DeepSeek-V4 checkpoint uses are listed so that their shards can still be checked.
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One stored tensor: safetensors dtype ("BF16", "F8_E4M3", ...), shape, bytes, and the file that holds it."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderScan:
    """Tensors by name, sorted, and everything that is wrong with the files, one sentence each.

    `unreadable` names the tensors that those faults concern; they are not in `tensors`.
    """

    tensors: Mapping[str, TensorInfo]
    unreadable: frozenset[str]
    problems: tuple[str, ...]


def read_json_object(path: Path) -> dict[str, object]:
    """A JSON file whose top level is an object; raises ValueError naming the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: point to the folder of a whole checkpoint") from None
    except ValueError:
        raise ValueError(f"{path} is not valid JSON: download it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object: download it again")
    return value


def scan_folder(folder: Path) -> FolderScan:
    """Read the index and all headers of `folder`; tensor data is never touched.

    Faults of single files are collected in `problems`. Raises ValueError where there is nothing to read at all:
    no safetensors weights, several files without an index, an unusable index.
    """
    index_path = folder / INDEX_NAME
    weight_map = _read_index(index_path) if index_path.exists() else None
    files = sorted(set(weight_map.values())) if weight_map is not None else [_lone_file(folder)]
    tensors: dict[str, TensorInfo] = {}
    problems: list[str] = []
    unreadable: set[str] = set()
    for file in files:
        try:
            found = read_header(folder / file)
        except ValueError as error:
            problems.append(str(error))
            unreadable |= {name for name, listed in (weight_map or {}).items() if listed == file}
            continue
        for name, info in found.items():
            if weight_map is not None and weight_map.get(name) != file:
                listed = weight_map.get(name)
                where = f"lists it in {listed}" if listed else "does not list it"
                problems.append(f"{file} holds {name} but {INDEX_NAME} {where}: use the index that came with the files")
                unreadable.add(name)
            else:
                tensors[name] = info
    for name, file in (weight_map or {}).items():
        if name not in tensors and name not in unreadable:
            unreadable.add(name)
            problems.append(f"{INDEX_NAME} lists {name} in {file}, which does not hold it: download the file again")
    return FolderScan(
        tensors=dict(sorted(tensors.items())),
        unreadable=frozenset(unreadable - tensors.keys()),
        problems=tuple(problems),
    )


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, from its header; raises ValueError if the file is not whole."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            raw = file.read(length) if 8 + length <= size else b""
    except FileNotFoundError:
        raise ValueError(f"{path.name} is missing from {path.parent}: download it") from None
    try:
        header = json.loads(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {name: _tensor_info(entry, path.name) for name, entry in entries.items()}
        spans = sorted((entry["data_offsets"][0], entry["data_offsets"][1]) for entry in entries.values())
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        raise ValueError(f"{path.name} has no readable safetensors header: download it again") from None
    expected = 8 + length + (spans[-1][1] if spans else 0)
    if size != expected:
        fault = "truncated" if size < expected else "too long"
        raise ValueError(f"{path.name} is {fault} ({size} bytes instead of {expected}): download it again")
    ends = [0, *(stop for _, stop in spans)]
    if any(start != end for (start, _), end in zip(spans, ends, strict=False)):
        raise ValueError(f"{path.name} has overlapping or missing tensor bytes: download it again")
    for name, info in tensors.items():
        item = ITEM_BYTES.get(info.dtype)
        if item is not None and info.nbytes != item * math.prod(info.shape):
            raise ValueError(f"{path.name} stores {info.nbytes} bytes for {name}, not its shape's: download it again")
    return tensors


def _tensor_info(entry: Mapping[str, Any], file: str) -> TensorInfo:
    start, stop = entry["data_offsets"]
    return TensorInfo(dtype=entry["dtype"], shape=tuple(int(n) for n in entry["shape"]), nbytes=stop - start, file=file)


def _read_index(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{path} lists no tensors: its weight_map must name a file for each, download it again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
            raise ValueError(f"{path} puts {name} in {file!r}: only .safetensors files beside the index are read")
    return weight_map


def _lone_file(folder: Path) -> str:
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if SINGLE_NAME in names:
        return SINGLE_NAME
    if len(names) == 1:
        return names[0]
    if names:
        raise ValueError(f"{folder} has {len(names)} safetensors files but no {INDEX_NAME}: download the index")
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise ValueError(
            f"{folder} holds {pickles[0]} but no safetensors: convert it, pickled weights are never opened"
        )
    raise ValueError(f"{folder} holds no weights: it needs {SINGLE_NAME} or {INDEX_NAME} with its shards")
