"""Fill a model, built on the meta device, with a checkpoint's weights, one stored tensor at a time."""

import math
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from tqdm import tqdm

from compressed_spec.kernels.dequantize import dequantize_fp4, dequantize_fp8
from compressed_spec.models.deepseek_v4.checkpoint import Checkpoint, some_of
from compressed_spec.models.deepseek_v4.quantized import (
    QuantizedKernels,
    StoredNames,
    check_fp4_scale,
    quantize_modules,
    raw_regions,
)
from compressed_spec.models.deepseek_v4.slices import Read, Region, reads_of
from compressed_spec.models.deepseek_v4.weight_plan import StorageFormat, WeightPlan, plan_weights
from compressed_spec.parallel import ALONE, ParallelGroup

_SCALE_DTYPES = {"F8_E8M0": torch.float8_e8m0fnu, "F32": torch.float32, "BF16": torch.float32}
_MAX_OPEN_FILES = 4  # mapped shards kept at once; a layer's tensors lie in one file, seldom in two
_MAPPED_BYTES = 64 << 20  # read from mapped shards before their pages, which count as this process's, are given back


def load_weights(
    model: nn.Module,
    checkpoint: Checkpoint,
    *,
    device: torch.device | str,
    progress: bool = True,
    quantized: QuantizedKernels | None = None,
    group: ParallelGroup = ALONE,
) -> None:
    """Replace every parameter and persistent buffer of `model` (meta or real) by the checkpoint's values on `device`.

    group: the processes that share the model; only this one's slices are read. Quantised tensors are decoded in
    float32; each result is cast to the dtype that the model's parameter already has. Beside the model itself, memory
    holds one stored tensor's slice at a time. On the device "meta" everything is read and checked, and nothing kept.
    quantized: leave FP8 and FP4 weights as they are stored, for these kernels, in modules that take the place of the
    model's (which must be on the meta device, of one process); see the file of that name.

    Raises:
        ValueError: a tensor is missing, left over, mis-shaped, of a wrong dtype, or holds values that cannot be.
    """
    plan = checked_plan(checkpoint)
    targets = model.state_dict()
    assert targets.keys() == plan.sources.keys(), f"names differ: {sorted(targets.keys() ^ plan.sources.keys())[:3]}"
    stored: dict[str, StoredNames] = {}
    if quantized is not None:
        assert group.size == 1, "packed weights are not cut"
        stored = quantize_modules(
            model, plan.sources, lambda name: _SCALE_DTYPES[checkpoint.tensors[name].dtype], quantized
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
            for read in reads_of(name, plan.sources[name], checkpoint, group):
                regions = raw_regions(read.piece, state[codes], state[scale])
                for region, raw in zip(regions, reader.raw(read), strict=True):
                    region.copy_(raw)
            check_fp4_scale(scale, state[scale])
            continue
        target = targets[name]
        state[name] = torch.empty(target.shape, dtype=target.dtype, device=device)
        for read in reads_of(name, plan.sources[name], checkpoint, group):
            piece = read.piece
            region = state[name] if read.expert is None else state[name][read.expert, piece.row_start : piece.row_stop]
            reader.read(read, region)
    model.load_state_dict(state, strict=True, assign=True)


def checked_plan(checkpoint: Checkpoint) -> WeightPlan:
    """How the checkpoint fills the model; raises ValueError if it is damaged or does not fit its config."""
    if checkpoint.problems:
        raise ValueError(f"{checkpoint.folder} cannot be read: {some_of(checkpoint.problems)}")
    plan = plan_weights(checkpoint)
    if plan.problems:
        count = len(plan.problems)
        raise ValueError(
            f"{checkpoint.folder} does not fit its config.json in {count} tensor{'s' if count > 1 else ''}: "
            f"{some_of(plan.problems)} (take config and weights from the same checkpoint)"
        )
    return plan


class _Reader:
    """Decodes slices of tensors; keeps the last few shards mapped."""

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self._checkpoint = checkpoint
        self._device = device
        self._open: dict[str, Any] = {}
        self._num_bytes = 0

    def read(self, read: Read, target: torch.Tensor) -> None:
        """Put the numbers of one slice where they belong."""
        piece = read.piece
        if piece.scale is None:
            self._read_plain(read, target)
            return
        codes, scale = self.raw(read)
        if piece.format is StorageFormat.FP4:
            target.copy_(dequantize_fp4(codes, scale))
        else:
            assert piece.block is not None
            target.copy_(dequantize_fp8(codes, scale, piece.block, read.offset))

    def raw(self, read: Read) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of a slice that is quantised, as stored, on the device."""
        assert read.piece.scale is not None, f"{read.piece.tensor} is not quantised"
        assert read.scale is not None
        scale = self._tensor(read.piece.scale, read.scale)
        self._check_scale(read.piece.scale, scale)
        return self._tensor(read.piece.tensor, read.weight).to(self._device), scale.to(self._device)

    def _read_plain(self, read: Read, target: torch.Tensor) -> None:
        """In parts: an embedding takes gigabytes, and nothing else of this process runs while a part is read."""
        *lead, rows = read.weight[: -1 if len(read.weight) > 1 else None]
        last = read.weight[-1:] if len(read.weight) > 1 else ()
        info = self._checkpoint.tensors[read.piece.tensor]
        row_bytes = info.nbytes * math.prod(map(len, last)) // max(math.prod(info.shape), 1)
        step = max(_MAPPED_BYTES // max(row_bytes, 1), 1)
        for begin in range(0, len(rows), step):
            part = rows[begin : begin + step]
            stored = self._tensor(read.piece.tensor, (*lead, part, *last))
            if read.piece.tensor.endswith(".tid2eid"):
                self._check_expert_ids(read.piece.tensor, stored)
            target[begin : begin + step].copy_(stored.to(self._device))

    def _tensor(self, name: str, region: Region) -> torch.Tensor:
        """A region of a stored tensor, on the CPU; a leading dimension of one expert is dropped."""
        info = self._checkpoint.tensors[name]
        index = tuple(slice(part.start, part.stop) for part in region)
        tensor: torch.Tensor = self._handle(info.file).get_slice(name)[index]
        self._num_bytes += tensor.nbytes
        return tensor[0] if tensor.dim() == 3 else tensor

    def _handle(self, file: str) -> Any:
        if self._num_bytes > _MAPPED_BYTES:
            self._open.clear()
            self._num_bytes = 0
        if file not in self._open:
            if len(self._open) >= _MAX_OPEN_FILES:
                del self._open[next(iter(self._open))]
            self._open[file] = safe_open(self._checkpoint.folder / file, framework="pt")
        return self._open[file]

    def _check_expert_ids(self, name: str, table_VK: torch.Tensor) -> None:
        low, high, count = int(table_VK.min()), int(table_VK.max()), self._checkpoint.config.n_routed_experts
        if low < 0 or high >= count:
            raise ValueError(f"{name} names experts {low} to {high}, but there are only 0 to {count - 1}")

    @staticmethod
    def _check_scale(name: str, scale: torch.Tensor) -> None:
        values = scale.to(torch.float32)
        if not bool(((values > 0) & torch.isfinite(values)).all()):
            raise ValueError(f"{name} holds a scale that is not a positive finite number: download its file again")
