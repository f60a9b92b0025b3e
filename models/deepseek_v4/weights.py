"""Fill a model, built on the meta device, with a checkpoint's weights, one stored tensor at a time."""

from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from tqdm import tqdm

from compressed_spec.kernels.dequantize import dequantize_fp4, dequantize_fp8
from compressed_spec.models.deepseek_v4.checkpoint import Checkpoint, some_of
from compressed_spec.models.deepseek_v4.quantized import (
    StoredNames,
    check_fp4_scale,
    quantize_modules,
    quantized_kernels,
    raw_regions,
)
from compressed_spec.models.deepseek_v4.weight_plan import Piece, StorageFormat, plan_weights

_SCALE_DTYPES = {"F8_E8M0": torch.float8_e8m0fnu, "F32": torch.float32, "BF16": torch.float32}
_MAX_OPEN_FILES = 4  # mapped shards kept at once; a layer's tensors lie in one file, seldom in two


def load_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    device: torch.device | str,
    progress: bool = True,
    keep_quantized: bool = False,
) -> None:
    """Replace every parameter and persistent buffer of `model` (meta or real) by the checkpoint's values on `device`.

    Quantised tensors are decoded in float32; each result is cast to the dtype that the model's parameter already has.
    Beside the model itself, memory holds one stored tensor at a time. keep_quantized: leave FP8 and FP4 weights as they
    are stored, in modules that take the place of the model's (which must be on the meta device); see `quantized`.

    Raises:
        ValueError: a tensor is missing, left over, mis-shaped, of a wrong dtype, or holds values that cannot be.
    """
    if checkpoint.problems:
        raise ValueError(f"{checkpoint.folder} cannot be read: {some_of(checkpoint.problems)}")
    plan = plan_weights(checkpoint)
    if plan.problems:
        count = len(plan.problems)
        raise ValueError(
            f"{checkpoint.folder} does not fit its config.json in {count} tensor{'s' if count > 1 else ''}: "
            f"{some_of(plan.problems)} (take config and weights from the same checkpoint)"
        )
    targets = model.state_dict()
    assert targets.keys() == plan.sources.keys(), f"names differ: {sorted(targets.keys() ^ plan.sources.keys())[:3]}"
    stored: dict[str, StoredNames] = {}
    if keep_quantized:
        kernels = quantized_kernels(torch.device(device))
        stored = quantize_modules(
            model, plan.sources, lambda name: _SCALE_DTYPES[checkpoint.tensors[name].dtype], kernels
        )
        targets = model.state_dict()
    reader = _Reader(checkpoint, torch.device(device))
    state: dict[str, torch.Tensor] = {}
    order = sorted(plan.sources, key=lambda name: (checkpoint.tensors[plan.sources[name][0].tensor].file, name))
    for name in tqdm(order, desc="loading weights", unit="tensor", disable=None if progress else True):
        if name in stored:
            codes, scale = stored[name].codes, stored[name].scale
            for half in (codes, scale):
                state[half] = torch.empty(targets[half].shape, dtype=targets[half].dtype, device=device)
            for piece in plan.sources[name]:
                for region, raw in zip(raw_regions(piece, state[codes], state[scale]), reader.raw(piece), strict=True):
                    region.copy_(raw)
            check_fp4_scale(scale, state[scale])
            continue
        target = targets[name]
        state[name] = torch.empty(target.shape, dtype=target.dtype, device=device)
        for piece in plan.sources[name]:
            region = (
                state[name] if piece.expert is None else state[name][piece.expert, piece.row_start : piece.row_stop]
            )
            region.copy_(reader.read(piece))
        if name.endswith(".tid2eid"):
            _check_expert_ids(name, state[name], checkpoint.config.n_routed_experts)
    model.load_state_dict(state, strict=True, assign=True)


def _check_expert_ids(name: str, table_VK: torch.Tensor, num_experts: int) -> None:
    low, high = int(table_VK.min()), int(table_VK.max())
    if low < 0 or high >= num_experts:
        raise ValueError(f"{name} names experts {low} to {high}, but there are only 0 to {num_experts - 1}")


class _Reader:
    """Decodes pieces; keeps the last few shards mapped."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._open: dict[str, Any] = {}

    def read(self, piece: Piece) -> torch.Tensor:
        """Numbers of one piece, on the device; float32 if it was quantised, else as stored."""
        raw = self._tensor(piece.tensor, piece.source_expert)
        if piece.scale is None:
            return raw
        scale = self._tensor(piece.scale, piece.source_expert)
        self._check_scale(piece.scale, scale)
        if piece.format is StorageFormat.FP4:
            return dequantize_fp4(raw, scale)
        assert piece.block is not None
        return dequantize_fp8(raw, scale, piece.block)

    def raw(self, piece: Piece) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of one piece that is quantised, as stored, on the device."""
        assert piece.scale is not None, f"{piece.tensor} is not quantised"
        scale = self._tensor(piece.scale, piece.source_expert)
        self._check_scale(piece.scale, scale)
        return self._tensor(piece.tensor, piece.source_expert), scale

    def _tensor(self, name: str, expert: int | None) -> torch.Tensor:
        handle = self._handle(self._checkpoint.tensors[name].file)
        tensor: torch.Tensor = handle.get_tensor(name) if expert is None else handle.get_slice(name)[expert]
        return tensor.to(self._device)

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            if len(self._open) >= _MAX_OPEN_FILES:
                del self._open[next(iter(self._open))]
            self._open[file] = safe_open(self._checkpoint.folder / file, framework="pt")
        return self._open[file]

    @staticmethod
    def _check_scale(name: str, scale: torch.Tensor) -> None:
        values = scale.to(torch.float32)
        if not bool(((values > 0) & torch.isfinite(values)).all()):
            raise ValueError(f"{name} holds a scale that is not a positive finite number: download its file again")
