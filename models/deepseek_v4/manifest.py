"""Lists of a checkpoint's tensors without the checkpoint: read from a table, or worked out from a config.

A table has a line a tensor: name, safetensors dtype, shape as JSON, with tabs between; it may be gzipped. A name may
hold one range, as in `layers.0.ffn.experts.{0..255}.w1.weight`, which stands for a tensor each.
"""

import gzip
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path

from compressed_spec.kernels.dequantize import FP4_GROUP
from compressed_spec.models.deepseek_v4.checkpoint import Checkpoint, detect_draft_head, detect_layout
from compressed_spec.models.deepseek_v4.checkpoint import weight_block_size as declared_block
from compressed_spec.models.deepseek_v4.config import DeepseekV4Config, parse_config
from compressed_spec.models.deepseek_v4.names import DraftHeadKind, Shape, expected_parameters
from compressed_spec.models.deepseek_v4.safetensors_folder import ITEM_BYTES, TensorInfo, read_json_object
from compressed_spec.models.deepseek_v4.stored_kinds import StoredKind, stored_kind

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_BLOCK = 128
_PLAIN_DTYPES = {StoredKind.TABLE: "I64", StoredKind.WIDE: "F32", StoredKind.PLAIN: "BF16"}


def read_manifest(path: Path) -> dict[str, TensorInfo]:
    """The tensors that a table lists. Raises ValueError naming the file, and the line that cannot be read."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error}): name a table of tensors.") from None
    except (EOFError, UnicodeDecodeError):
        raise ValueError(f"{path} is no table of tensors: give lines of name, dtype and shape, with tabs.") from None
    tensors: dict[str, TensorInfo] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            name, dtype, shape = line.split("\t")
            info = _info(dtype, tuple(int(size) for size in json.loads(shape)))
        except (ValueError, TypeError, KeyError):
            raise ValueError(
                f"{path} has no tensor in line {number}: give its name, dtype and shape, with tabs between."
            ) from None
        for one in _expand(name):
            if one in tensors:
                raise ValueError(f"{path} lists {one} twice, the second time in line {number}: drop one.")
            tensors[one] = info
    return tensors


def described_checkpoint(config_path: Path, manifest_path: Path | None) -> Checkpoint:
    """A checkpoint of which only the config and the list of tensors are here; without a list, as upstream stores it.

    Raises ValueError for files that cannot be read, or a config that cannot be run.
    """
    raw = read_json_object(config_path)
    config = parse_config(raw)
    if manifest_path is not None:
        tensors = read_manifest(manifest_path)
    else:
        kind = DraftHeadKind.DSPARK if config.dspark is not None else DraftHeadKind.MTP
        head = kind if config.num_nextn_predict_layers else DraftHeadKind.NONE
        tensors = stored_tensors(config, head, experts=str(raw.get("expert_dtype", "fp4")))
    return Checkpoint(
        folder=(manifest_path or config_path).parent,
        config=config,
        layout=detect_layout(tensors),
        draft_head=detect_draft_head(tensors),
        weight_block_size=declared_block(raw),
        tensors=tensors,
        unreadable=frozenset(),
        problems=(),
    )


def stored_tensors(
    config: DeepseekV4Config,
    draft_head: DraftHeadKind,
    *,
    experts: str,
    num_draft_layers: int = 3,
) -> dict[str, TensorInfo]:
    """The tensors of an upstream checkpoint of this configuration, sorted by name.

    experts: "fp4", or "fp8" as in the Base checkpoints, whose scales are all F32. num_draft_layers: of a DSpark head.
    Raises ValueError for experts stored otherwise.
    """
    if experts not in ("fp4", "fp8"):
        raise ValueError(f"expert_dtype is {experts!r}: upstream checkpoints have 'fp4' or 'fp8'")
    scale_dtype = "F8_E8M0" if experts == "fp4" else "F32"
    tensors: dict[str, TensorInfo] = {}
    for name, shape in expected_parameters(config, draft_head, num_draft_layers).items():
        kind = stored_kind(name)
        if kind is StoredKind.EXPERTS:
            tensors |= _experts(name, shape, fp4=experts == "fp4", scale_dtype=scale_dtype)
        elif kind is StoredKind.LINEAR:
            tensors |= _fp8(name, shape, scale_dtype)
        else:
            tensors[name] = _info(_PLAIN_DTYPES[kind], shape)
    return dict(sorted(tensors.items()))


def _experts(parameter: str, shape: Shape, *, fp4: bool, scale_dtype: str) -> Mapping[str, TensorInfo]:
    count, rows, cols = shape
    prefix, stack = parameter.rsplit(".", 1)
    leaves, height = (("w1", "w3"), rows // 2) if stack == "w13" else (("w2",), rows)
    tensors: dict[str, TensorInfo] = {}
    for linear in (f"{prefix}.{e}.{leaf}" for e in range(count) for leaf in leaves):
        if fp4:
            tensors[f"{linear}.weight"] = _info("I8", (height, cols // 2))
            tensors[f"{linear}.scale"] = _info(scale_dtype, (height, cols // FP4_GROUP))
        else:
            tensors |= _fp8(f"{linear}.weight", (height, cols), scale_dtype)
    return tensors


def _fp8(weight: str, shape: Shape, scale_dtype: str) -> dict[str, TensorInfo]:
    rows, cols = shape
    scale = f"{weight.removesuffix('.weight')}.scale"
    return {weight: _info("F8_E4M3", shape), scale: _info(scale_dtype, (-(-rows // _BLOCK), -(-cols // _BLOCK)))}


def _info(dtype: str, shape: Shape) -> TensorInfo:
    return TensorInfo(dtype=dtype, shape=shape, nbytes=ITEM_BYTES[dtype] * math.prod(shape), file="")


def _expand(name: str) -> list[str]:
    found = _RANGE.search(name)
    if found is None:
        return [name]
    return [f"{name[: found.start()]}{i}{name[found.end() :]}" for i in range(int(found[1]), int(found[2]) + 1)]
