"""Which stored tensors make which model parameter, and how they decode: worked out from headers alone.

Tensor dtypes decide, never config.json: F8_E4M3 has block scales (E8M0, or float for the Base models), I8 is packed FP4
with E8M0 scales, I64 the token table, everything else a plain float.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from compressed_spec.kernels.dequantize import FP4_GROUP
from compressed_spec.models.deepseek_v4.checkpoint import Checkpoint, DraftHeadKind, Layout
from compressed_spec.models.deepseek_v4.names import (
    IGNORED_COPIES,
    Shape,
    expected_parameters,
    transformers_name,
    upstream_name,
)

_FLOATS = ("BF16", "F16", "F32", "F64")
_SCALES = ("F8_E8M0", "F32", "BF16")
_IDS = ("I64", "I32")
_DEFAULT_BLOCK = (128, 128)
_REMEDIES = {"head.weight": " (a head tied to the embedding is not supported: store it)"}


class StorageFormat(StrEnum):
    """How a stored tensor becomes numbers."""

    PLAIN = "plain"
    FP8 = "fp8"
    FP4 = "fp4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One read: a stored tensor (or expert `source_expert` of a stacked one) into a region of a parameter.

    The region is the whole parameter, or rows [row_start, row_stop) of its expert `expert`.
    """

    tensor: str
    format: StorageFormat
    scale: str | None = None
    block: tuple[int, int] | None = None
    source_expert: int | None = None
    expert: int | None = None
    row_start: int = 0
    row_stop: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlan:
    """`sources`: parameter to the reads that fill it. `problems`: all that keeps the checkpoint from loading."""

    sources: Mapping[str, tuple[Piece, ...]]
    ignored: tuple[str, ...]
    problems: tuple[str, ...]


def plan_weights(checkpoint: Checkpoint) -> WeightPlan:
    """Match every stored tensor with a parameter; whatever does not fit becomes a problem, one sentence each."""
    planner = _Planner(checkpoint)
    try:
        expected = expected_parameters(checkpoint.config, checkpoint.draft_head, checkpoint.num_draft_layers)
    except ValueError as error:
        return WeightPlan(sources={}, ignored=(), problems=(str(error),))
    sources = {parameter: tuple(planner.pieces(parameter, shape)) for parameter, shape in expected.items()}
    planner.set_aside_copies()
    return WeightPlan(sources=sources, ignored=tuple(planner.ignored), problems=planner.all_problems())


class _Planner:
    """Bookkeeping of one plan: which tensors are still unclaimed, and what went wrong."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._tensors = checkpoint.tensors
        self._draft_head, self._layout = checkpoint.draft_head, checkpoint.layout
        self._blocks = [b for b in (checkpoint.weight_block_size, _DEFAULT_BLOCK) if b is not None]
        self._problems: list[str] = []
        self._stored: dict[str, str] = {}  # upstream name -> stored name
        for name in checkpoint.tensors:
            canonical = upstream_name(name, checkpoint.layout)
            if canonical in self._stored:
                self._problems.append(f"{name} and {self._stored[canonical]} are the same tensor: keep one")
            else:
                self._stored[canonical] = name
        self._unreadable = {upstream_name(name, checkpoint.layout) for name in checkpoint.unreadable}
        self._unclaimed = dict.fromkeys(self._stored)
        self.ignored: list[str] = []

    def pieces(self, parameter: str, shape: Shape) -> Iterator[Piece]:
        if not parameter.endswith((".experts.w13", ".experts.w2")):
            piece = self._claim(parameter, shape)
            if piece is not None:
                yield piece
            return
        num_experts, rows, cols = shape
        prefix, stack = parameter.rsplit(".", 1)
        leaves = ("w1", "w3") if stack == "w13" else ("w2",)
        single = f"{prefix}.0.{leaves[0]}.weight" in self._stored
        if f"{parameter}.weight" in self._stored or (self._layout is Layout.TRANSFORMERS and not single):
            stacked = self._claim(f"{parameter}.weight", shape)
            if stacked is not None:
                for e in range(num_experts):
                    yield _at(stacked, source_expert=e, expert=e, row_start=0, row_stop=rows)
            return
        height = rows // len(leaves)
        for e in range(num_experts):
            for i, leaf in enumerate(leaves):
                piece = self._claim(f"{prefix}.{e}.{leaf}.weight", (height, cols))
                if piece is not None:
                    yield _at(piece, source_expert=None, expert=e, row_start=i * height, row_stop=(i + 1) * height)

    def set_aside_copies(self) -> None:
        """Move what is known and deliberately not loaded to `ignored`: see `IGNORED_COPIES`."""
        if self._draft_head is DraftHeadKind.MTP:
            names = [name for name in self._unclaimed if name in IGNORED_COPIES]
            for name in names:
                del self._unclaimed[name]
            self.ignored = [self._stored[name] for name in names]

    def all_problems(self) -> tuple[str, ...]:
        extra = [f"{self._stored[name]} is not a tensor of this architecture" for name in self._unclaimed]
        return (*self._problems, *extra)

    def _claim(self, name: str, shape: Shape) -> Piece | None:
        """Take `name` (and its scale) off the unclaimed list and say how it decodes, or note what is wrong."""
        stored = self._stored.get(name)
        scale_name = f"{name.removesuffix('.weight')}.scale"
        self._unclaimed.pop(name, None)
        if stored is None:
            self._unclaimed.pop(scale_name, None)
            if name not in self._unreadable:
                self._problems.append(f"{self._spoken(name)} is missing{_REMEDIES.get(name, '')}")
            return None
        info = self._tensors[stored]
        quantized = name.endswith(".weight") and len(shape) > 1
        if quantized and info.dtype in ("F8_E4M3", "I8"):
            self._unclaimed.pop(scale_name, None)
            return self._quantized(stored, scale_name, shape)
        dtypes = _IDS if name.endswith(".tid2eid") else _FLOATS
        if info.dtype not in dtypes:
            self._unclaimed.pop(scale_name, None)
            self._problems.append(f"{stored} has dtype {info.dtype}, which is none of {', '.join(dtypes)}")
        elif info.shape != shape:
            self._wrong_shape(stored, shape)
        elif quantized and scale_name in self._unclaimed:
            del self._unclaimed[scale_name]
            self._problems.append(
                f"{self._stored[scale_name]} scales {stored}, which is {info.dtype} and takes no scale"
            )
        else:
            return Piece(tensor=stored, format=StorageFormat.PLAIN)
        return None

    def _quantized(self, stored: str, scale_name: str, shape: Shape) -> Piece | None:
        *lead, rows, cols = shape
        fp4 = self._tensors[stored].dtype == "I8"
        stored_shape = (*lead, rows, cols // 2) if fp4 else shape
        if self._tensors[stored].shape != stored_shape or (fp4 and cols % FP4_GROUP):
            self._wrong_shape(stored, stored_shape)
            return None
        scale = self._stored.get(scale_name)
        if scale is None:
            if scale_name not in self._unreadable:
                self._problems.append(f"{stored} is {self._tensors[stored].dtype} but its scale is missing")
            return None
        info = self._tensors[scale]
        if info.dtype not in _SCALES:
            self._problems.append(f"{scale} has dtype {info.dtype}, which is none of {', '.join(_SCALES)}")
            return None
        if fp4:
            if info.shape == (*lead, rows, cols // FP4_GROUP):
                return Piece(tensor=stored, format=StorageFormat.FP4, scale=scale)
            self._wrong_shape(scale, (*lead, rows, cols // FP4_GROUP))
            return None
        grids = {block: (*lead, -(-rows // block[0]), -(-cols // block[1])) for block in self._blocks}
        for block, grid in grids.items():
            if info.shape == grid:
                return Piece(tensor=stored, format=StorageFormat.FP8, scale=scale, block=block)
        self._wrong_shape(scale, *grids.values())
        return None

    def _spoken(self, name: str) -> str:
        """A missing tensor's name as this checkpoint would spell it."""
        return transformers_name(name) if self._layout is Layout.TRANSFORMERS else name

    def _wrong_shape(self, stored: str, *expected: Shape) -> None:
        wanted = " or ".join(str(list(shape)) for shape in expected)
        self._problems.append(f"{stored} has shape {list(self._tensors[stored].shape)} instead of {wanted}")


def _at(piece: Piece, *, source_expert: int | None, expert: int, row_start: int, row_stop: int) -> Piece:
    return dataclasses.replace(
        piece, source_expert=source_expert, expert=expert, row_start=row_start, row_stop=row_stop
    )
