"""What one process reads of the stored tensors: its slices of the weights, and the scales that those need.

A region of a stored tensor is one range a dimension.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from compressed_spec.kernels.dequantize import FP4_GROUP
from compressed_spec.models.deepseek_v4.checkpoint import Checkpoint
from compressed_spec.models.deepseek_v4.names import Shape
from compressed_spec.models.deepseek_v4.parallel_plan import split_of
from compressed_spec.models.deepseek_v4.weight_plan import Piece, StorageFormat, WeightPlan
from compressed_spec.parallel import ParallelGroup

Region = tuple[range, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """One read, into rows [row_start, row_stop) of the process's expert `expert`, or into a whole parameter (None).

    weight, scale: regions of the piece's tensors. offset: row and column of the first weight in its first scale block.
    """

    piece: Piece
    weight: Region
    scale: Region | None
    offset: tuple[int, int]
    expert: int | None


def reads_of(parameter: str, pieces: tuple[Piece, ...], checkpoint: Checkpoint, group: ParallelGroup) -> Iterator[Read]:
    """What `group`'s process reads to fill its part of a parameter. Raises ValueError where FP4 cannot be cut so."""
    split = split_of(parameter)
    for piece in pieces:
        shape = checkpoint.tensors[piece.tensor].shape
        if piece.expert is not None:
            own = group.span(checkpoint.config.n_routed_experts)
            if piece.expert in own:
                yield _read(piece, checkpoint, _whole(shape), expert=piece.expert - own.start)
            continue
        region = _whole(shape)
        if split is not None:
            parts = group.span(shape[split.dim])
            region = (*region[: split.dim], parts, *region[split.dim + 1 :])
        yield _read(piece, checkpoint, region, expert=None)


def own_bytes(plan: WeightPlan, checkpoint: Checkpoint, group: ParallelGroup) -> int:
    """Bytes of stored tensors that a process reads, scales included."""
    total = 0
    for parameter, pieces in plan.sources.items():
        for read in reads_of(parameter, pieces, checkpoint, group):
            total += _region_bytes(checkpoint, read.piece.tensor, read.weight)
            if read.piece.scale is not None and read.scale is not None:
                total += _region_bytes(checkpoint, read.piece.scale, read.scale)
    return total


def _region_bytes(checkpoint: Checkpoint, tensor: str, region: Region) -> int:
    info = checkpoint.tensors[tensor]
    return info.nbytes * math.prod(map(len, region)) // math.prod(info.shape)


def _whole(shape: Shape) -> Region:
    return tuple(range(size) for size in shape)


def _read(piece: Piece, checkpoint: Checkpoint, weight: Region, *, expert: int | None) -> Read:
    lead: Region = ()
    if piece.source_expert is not None:
        lead = (range(piece.source_expert, piece.source_expert + 1),)
        weight = (*lead, *weight[1:])
    scale, offset = None, (0, 0)
    if piece.format is StorageFormat.FP8:
        assert piece.block is not None
        rows, cols = weight[-2:]
        scale = (*lead, _blocks(rows, piece.block[0]), _blocks(cols, piece.block[1]))
        offset = (rows.start % piece.block[0], cols.start % piece.block[1])
    elif piece.format is StorageFormat.FP4:
        rows, cols = weight[-2:]  # of bytes, two columns each
        if cols.start * 2 % FP4_GROUP or cols.stop * 2 % FP4_GROUP:
            raise ValueError(
                f"{piece.tensor} is FP4 and cannot be cut at column {2 * cols.start}, inside a group of {FP4_GROUP}: "
                "use fewer processes"
            )
        scale = (*lead, rows, range(cols.start * 2 // FP4_GROUP, cols.stop * 2 // FP4_GROUP))
    return Read(piece=piece, weight=weight, scale=scale, offset=offset, expert=expert)


def _blocks(span: range, block: int) -> range:
    """The blocks that a range touches."""
    return range(span.start // block, -(-span.stop // block))
