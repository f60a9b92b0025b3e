"""Which rows a commit moves: those of the accepted nodes, in every pool.

G = ways of finding rows, F = accepted nodes, T = nodes of a round
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from compressed_spec.kernels.commit import Moves
from compressed_spec.layout import Addressing, PoolSpec
from compressed_spec.rows import Ints, Nodes
from compressed_spec.tree import TokenTree


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """Accepted nodes of a round, path after path. num_after_F: nodes of its path that follow each."""

    slot_F: Ints
    position_F: Ints
    sequence_F: Ints
    num_after_F: Ints


def accepted_nodes(nodes: Nodes, trees: Sequence[TokenTree], paths: Sequence[Sequence[int]]) -> Accepted:
    """The nodes of one path a tree; `nodes` are those of the trees, one after the other."""
    flat: list[int] = []
    num_after: list[int] = []
    first = 0
    for tree, path in zip(trees, paths, strict=True):
        flat += [first + node for node in path]
        num_after += range(len(path) - 1, -1, -1)
        first += len(tree)
    node_F = np.array(flat, dtype=np.int64)
    depth_F = nodes.depth_T[node_F]
    return Accepted(
        slot_F=nodes.ancestors_TA[node_F, depth_F],
        position_F=nodes.start_T[node_F] + depth_F,
        sequence_F=nodes.sequence_T[node_F],
        num_after_F=np.array(num_after, dtype=np.int64),
    )


class Lanes:
    """Pools by the way their rows are found, for pools that are found alike move alike.

    A node's row is row `(position + shift) // ratio % per_sequence` of its sequence's. It moves if this position is the
    last that the row stands for, and fewer than `most_after` accepted nodes follow: of a path longer than a ring, only
    the end is left.

    lane_of: the lane of each of `specs`.
    """

    def __init__(self, specs: Sequence[PoolSpec], batch_size: int) -> None:
        lanes: dict[tuple[int, int, int, int], list[str]] = {}
        for pool in specs:
            entries = pool.addressing is Addressing.ENTRIES
            ratio = pool.compression.ratio if entries and pool.compression is not None else 1
            most_after = sys.maxsize if entries else pool.per_sequence
            lanes.setdefault((pool.shift, ratio, pool.per_sequence, most_after), []).append(pool.name)
        self.pools = tuple(map(tuple, lanes.values()))
        lane_of = {name: lane for lane, pools in enumerate(self.pools) for name in pools}
        self.lane_of = tuple(lane_of[pool.name] for pool in specs)
        shift, ratio, per_sequence, most_after = np.array(list(lanes), dtype=np.int64).T[:, :, None]
        self._shift_G1, self._ratio_G1, self._most_after_G1 = shift, ratio, most_after
        self._per_sequence_G1, self._num_persistent_G1 = per_sequence, batch_size * per_sequence
        self._modulus_G1 = np.maximum(per_sequence, 1)  # a short sequence may have no entries at all

    def moves(self, accepted: Accepted, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Source and destination rows, for each of `pools`."""
        both_2GF, keep_GF = self._rows(accepted)
        source, target = torch.from_numpy(both_2GF[:, keep_GF]).to(device)
        counts = keep_GF.sum(1).tolist()
        return list(zip(source.split(counts), target.split(counts), strict=True))

    def moves_at_once(self, accepted: Accepted, device: torch.device) -> Moves:
        """The same with a line for each of `pools`, for a device that moves all of them together."""
        both_2GF, keep_GF = self._rows(accepted)
        source_MN, target_MN = torch.from_numpy(np.where(keep_GF, both_2GF, -1)).to(device, non_blocking=True)
        return Moves(source_MN=source_MN, target_MN=target_MN)

    def _rows(self, accepted: Accepted) -> tuple[Ints, NDArray[np.bool_]]:
        """Source and destination rows of every accepted node, and which of them move."""
        position_GF = accepted.position_F + self._shift_G1
        keep_GF = accepted.num_after_F < self._most_after_G1
        keep_GF &= position_GF >= 0
        keep_GF &= (position_GF + 1) % self._ratio_G1 == 0
        both_2GF = np.empty((2, *position_GF.shape), dtype=np.int64)
        np.add(accepted.slot_F, self._num_persistent_G1, out=both_2GF[0])
        np.add(
            accepted.sequence_F * self._per_sequence_G1,
            position_GF // self._ratio_G1 % self._modulus_G1,
            out=both_2GF[1],
        )
        return both_2GF, keep_GF
