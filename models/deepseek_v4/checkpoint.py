"""A DeepSeek-V4 checkpoint on disk, described without reading any weight."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from compressed_spec.models.deepseek_v4.config import DeepseekV4Config, parse_config
from compressed_spec.models.deepseek_v4.json_fields import read_list, read_section
from compressed_spec.models.deepseek_v4.names import DraftHeadKind, Layout
from compressed_spec.models.deepseek_v4.safetensors_folder import TensorInfo, read_json_object, scan_folder

__all__ = ["Checkpoint", "DraftHeadKind", "Layout", "TensorInfo", "open_checkpoint", "read_checkpoint", "some_of"]

# What is fetched from the hub: weights in safetensors and plain data. Never pickles, never code.
_ALLOW_PATTERNS = ["*.json", "*.safetensors", "tokenizer.model", "*.txt", "*.jinja"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Config, tensor headers and what follows from them.

    `problems` lists faults of the files themselves, `unreadable` the tensors that they put out of reach.
    """

    folder: Path
    config: DeepseekV4Config
    layout: Layout
    draft_head: DraftHeadKind
    weight_block_size: tuple[int, int] | None  # rows, columns of an FP8 scale block, as config.json declares it
    tensors: Mapping[str, TensorInfo]
    unreadable: frozenset[str]
    problems: tuple[str, ...]

    @property
    def num_draft_layers(self) -> int:
        """Blocks of the draft head, counted by their tensors: config.json says 1 where a DSpark head has 3."""
        names = (name.split(".") for name in self.tensors.keys() | self.unreadable)
        return len({parts[1] for parts in names if parts[0] == "mtp" and len(parts) > 1})


def open_checkpoint(path_or_repo_id: str | Path) -> Checkpoint:
    """Describe a checkpoint: a local folder, or a Hugging Face repo id, which is downloaded (safetensors only).

    Raises:
        ValueError: no such folder or repo, no safetensors weights, a missing or damaged file, an unusable config.
    """
    checkpoint = read_checkpoint(path_or_repo_id)
    if checkpoint.problems:
        raise ValueError(f"{checkpoint.folder} cannot be read: {some_of(checkpoint.problems)}")
    return checkpoint


def read_checkpoint(path_or_repo_id: str | Path) -> Checkpoint:
    """As `open_checkpoint`, but faults of single files end up in `problems` instead of raising."""
    folder = resolve_folder(path_or_repo_id)
    raw = read_json_object(folder / "config.json")
    config = parse_config(raw)
    scan = scan_folder(folder)
    names = scan.tensors.keys() | scan.unreadable
    return Checkpoint(
        folder=folder,
        config=config,
        layout=detect_layout(names),
        draft_head=detect_draft_head(names),
        weight_block_size=weight_block_size(raw),
        tensors=scan.tensors,
        unreadable=scan.unreadable,
        problems=scan.problems,
    )


def detect_layout(names: Iterable[str]) -> Layout:
    """transformers puts the body below `model.`; upstream has no such prefix."""
    return Layout.TRANSFORMERS if any(name.startswith("model.") for name in names) else Layout.UPSTREAM


def detect_draft_head(names: Iterable[str]) -> DraftHeadKind:
    """Told by the projection that feeds the head: `e_proj` for MTP, `main_proj` for DSpark."""
    found = set(names)
    if "mtp.0.e_proj.weight" in found:
        return DraftHeadKind.MTP
    return DraftHeadKind.DSPARK if "mtp.0.main_proj.weight" in found else DraftHeadKind.NONE


def some_of(items: tuple[str, ...], limit: int = 3) -> str:
    """The first few of many, and how many more."""
    more = f"; and {len(items) - limit} more" if len(items) > limit else ""
    return "; ".join(items[:limit]) + more


def resolve_folder(path_or_repo_id: str | Path) -> Path:
    path = Path(path_or_repo_id).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(f"{path} is a file: give the folder that holds config.json and the weights")
    repo_id = str(path_or_repo_id)
    if isinstance(path_or_repo_id, Path) or repo_id.startswith((".", "~", "/")) or repo_id.count("/") != 1:
        raise ValueError(f"{path} does not exist: give a checkpoint folder or a Hugging Face repo id")
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=_ALLOW_PATTERNS))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = type(error).__name__
        raise ValueError(
            f"{repo_id} is no folder here and cannot be had from the Hugging Face hub ({reason}): check the name and "
            "the connection"
        ) from error


def weight_block_size(raw: Mapping[str, object]) -> tuple[int, int] | None:
    sizes = read_list(read_section(raw, "quantization_config") or {}, "weight_block_size", length=2)
    if sizes is None:
        return None
    rows, cols = sizes
    if type(rows) is not int or type(cols) is not int or rows < 1 or cols < 1:
        raise ValueError(f"quantization_config.weight_block_size is {list(sizes)!r}: it needs two positive integers")
    return rows, cols
