"""The commit in two launches, whatever the number of layers and pools: the moves, then every row of every pool.

B = trees, A = longest path, N = B A entries of all paths, T = nodes, M = ways of addressing, P = pools
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from compressed_spec.kernels.commit import ENTRIES, RING, Moves
from compressed_spec.kernels.triton_device import launching_on

MOVE_BLOCK = 128
WORD_BLOCK = 1024
_RING, _ENTRIES = tl.constexpr(RING), tl.constexpr(ENTRIES)


@triton.jit
def commit_moves_kernel(
    p_path,
    p_position,
    p_sequence,
    p_slot,
    p_lanes,
    p_source,
    p_target,
    num_entries,
    longest,
    BLOCK: tl.constexpr,
):
    lane = p_lanes + tl.program_id(0) * 5
    kind, per_sequence, shift = tl.load(lane), tl.load(lane + 1), tl.load(lane + 2)
    ratio, num_persistent = tl.load(lane + 3), tl.load(lane + 4)
    entry = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = entry < num_entries
    node = tl.load(p_path + entry, mask=inside, other=-1)
    keep = node >= 0
    place = entry % longest
    count = tl.zeros([BLOCK], tl.int32)
    for other in range(0, longest):
        count += (tl.load(p_path + entry - place + other, mask=inside, other=-1) >= 0).to(tl.int32)
    position = tl.load(p_position + node, mask=keep, other=0) + shift
    if kind == _RING:
        keep = keep & (place >= count - per_sequence) & (position >= 0)
        row = position % per_sequence
    elif kind == _ENTRIES:
        keep = keep & ((position + 1) % ratio == 0)
        row = position // ratio
    else:
        keep = keep & (place == count - 1)
        row = position * 0
    source = num_persistent + tl.load(p_slot + node, mask=keep, other=0)
    target = tl.load(p_sequence + node, mask=keep, other=0) * per_sequence + row
    out = tl.program_id(0) * num_entries + entry
    tl.store(p_source + out, tl.where(keep, source, -1), mask=inside)
    tl.store(p_target + out, tl.where(keep, target, -1), mask=inside)


@triton.jit
def commit_rows_kernel(p_pools, p_source, p_target, num_entries, BLOCK: tl.constexpr):
    """Entry, pool and layer by program; a pool is (address, layers, words a layer, words a row, lane)."""
    pool = p_pools + tl.program_id(1) * 5
    lane, layer = tl.load(pool + 4), tl.program_id(2)
    source = tl.load(p_source + lane * num_entries + tl.program_id(0))
    if (source >= 0) & (layer < tl.load(pool + 1)):
        target = tl.load(p_target + lane * num_entries + tl.program_id(0))
        words = tl.load(pool + 3)
        start = tl.load(pool).to(tl.pointer_type(tl.int32)) + layer * tl.load(pool + 2)
        for first in range(0, words, BLOCK):
            word = first + tl.arange(0, BLOCK)
            values = tl.load(start + source * words + word, mask=word < words)
            tl.store(start + target * words + word, values, mask=word < words)


def commit_moves(
    path_BA: torch.Tensor,
    position_T: torch.Tensor,
    sequence_T: torch.Tensor,
    slot_T: torch.Tensor,
    lanes_M5: torch.Tensor,
) -> Moves:
    """See `kernels.commit`."""
    num_entries = path_BA.numel()
    source_MN, target_MN = torch.empty(
        (2, len(lanes_M5), num_entries), dtype=torch.int64, device=path_BA.device
    ).unbind()
    commit_moves_kernel[(len(lanes_M5), triton.cdiv(num_entries, MOVE_BLOCK))](
        path_BA.contiguous(),
        position_T,
        sequence_T,
        slot_T,
        lanes_M5,
        source_MN,
        target_MN,
        num_entries,
        path_BA.shape[1],
        BLOCK=MOVE_BLOCK,
    )
    return Moves(source_MN=source_MN, target_MN=target_MN)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTable:
    """Pools by address, int64 `[P, 5]`, and the most layers of one. Valid as long as the pools stay where they are."""

    pools_P5: torch.Tensor
    most_layers: int


def pool_table(pools: Sequence[torch.Tensor], lane_of: Sequence[int]) -> PoolTable:
    """Pools `[L, R, D]` and the lane of each, to be made once. Rows must be whole words of 4 bytes."""
    fields = []
    for pool_LRD, lane in zip(pools, lane_of, strict=True):
        layers, rows, width = pool_LRD.shape
        words, rest = divmod(width * pool_LRD.element_size(), 4)
        assert rest == 0, "a row is a whole number of words"
        assert pool_LRD.is_contiguous(), "layers and rows lie one after the other"
        fields.append([pool_LRD.data_ptr(), layers, rows * words, words, lane])
    table_P5 = torch.tensor(fields, dtype=torch.int64, device=pools[0].device)
    return PoolTable(pools_P5=table_P5, most_layers=max(len(pool_LRD) for pool_LRD in pools))


def commit_rows(table: PoolTable, moves: Moves) -> None:
    """See `kernels.commit`, over a table of the pools in place of their list."""
    num_entries = moves.source_MN.shape[1]
    commit_rows_kernel[(num_entries, len(table.pools_P5), table.most_layers)](
        table.pools_P5, moves.source_MN, moves.target_MN, num_entries, BLOCK=WORD_BLOCK
    )


class RowMover:
    """`kernels.commit.commit_rows` in one launch. The table is made anew where the pools are others than before."""

    def __init__(self) -> None:
        self._key: tuple[int, ...] = ()
        self._table: PoolTable | None = None

    def __call__(self, pools: Sequence[torch.Tensor], lane_of: Sequence[int], moves: Moves) -> None:
        """Move the rows of every layer of the pools."""
        key = (*(pool.data_ptr() for pool in pools), *lane_of)
        if self._table is None or key != self._key:
            self._key, self._table = key, pool_table(pools, lane_of)
        with launching_on(pools[0].device):
            commit_rows(self._table, moves)
