"""Draft heads stepped without the host: what `HeadSteps` and `BlockSteps` do, as tensors.

B = trees, F = nodes of a level, N = head nodes, S = places of a block, W = window, M = residual streams, D = model
width, V = vocabulary
"""

from collections.abc import Callable
from typing import Protocol

import torch

from compressed_spec.cache import Cache, Scratch
from compressed_spec.target import DraftBlock, DraftStep, TargetModel


class DeviceSteps(Protocol):
    """A head in one round. The levels are asked for in order, as many nodes a tree in each."""

    def root(self) -> torch.Tensor:
        """Logits after the roots, `[B, 1, V]`."""
        ...

    def descend(self, token_BF: torch.Tensor, parent_BF: torch.Tensor) -> torch.Tensor:
        """Logits `[B, F, V]` after the next level: these tokens, each below a node of the level before."""
        ...


# Made of a model, its cache, and rows, roots and committed lengths of the trees.
StepsMaker = Callable[[TargetModel, Cache, torch.Tensor, torch.Tensor, torch.Tensor], DeviceSteps]


class MTPDeviceSteps:
    """An MTP head's nodes, level after level; a node's scratch row is its index."""

    def __init__(
        self, model: TargetModel, cache: Cache, rows_B: torch.Tensor, roots_B: torch.Tensor, length_B: torch.Tensor
    ) -> None:
        self._model, self._cache, self._rows_B, self._roots_B = model, cache, rows_B, roots_B
        # The head's row of a root at position n lies at n - 1: one token is folded into the stream before it.
        self._start_B = length_B - 1
        self._parents_N, self._tree_N = rows_B.new_empty(0), rows_B.new_empty(0)
        self._streams_NMD = rows_B.new_empty(0)  # of the newest level
        self._num_levels = 0

    def root(self) -> torch.Tensor:
        """See `DeviceSteps`."""
        pending_BX = self._cache.pools["pending_stream"][0][self._rows_B]
        streams_BMD = pending_BX.unflatten(-1, (self._cache.spec.num_streams, -1))
        return self._process(self._roots_B.unsqueeze(1), torch.full_like(self._roots_B, -1), streams_BMD)

    def descend(self, token_BF: torch.Tensor, parent_BF: torch.Tensor) -> torch.Tensor:
        """See `DeviceSteps`."""
        num_above = len(self._streams_NMD) // len(token_BF)
        tree_B1 = torch.arange(len(token_BF), device=token_BF.device).unsqueeze(1)
        above_N = (tree_B1 * num_above + parent_BF).flatten()
        first_above = len(self._parents_N) - len(self._streams_NMD)
        return self._process(token_BF, first_above + above_N, self._streams_NMD[above_N])

    def _process(self, token_BF: torch.Tensor, parent_N: torch.Tensor, streams_NMD: torch.Tensor) -> torch.Tensor:
        from compressed_spec.kernels.row_plan_triton import NodeTable, node_table, window_rows

        (num_trees, width), cache, first = token_BF.shape, self._cache, len(self._parents_N)
        tree_B = torch.arange(num_trees, device=token_BF.device)
        self._num_levels += 1
        self._parents_N = torch.cat((self._parents_N, parent_N))
        self._tree_N = torch.cat((self._tree_N, tree_B.repeat_interleave(width)))
        slot_N = torch.arange(len(self._parents_N), device=token_BF.device)
        table = node_table(self._parents_N, self._tree_N, self._start_B, slot_N, self._num_levels)
        newest = NodeTable(
            sequence_T=self._rows_B[self._tree_N[first:]],
            start_T=table.start_T[first:],
            position_T=table.position_T[first:],
            slot_T=table.slot_T[first:],
            ancestors_TA=table.ancestors_TA[first:],
            parent_stream_T=table.parent_stream_T[first:],
        )
        step = DraftStep(
            streams_NMD=streams_NMD,
            tokens_N=token_BF.flatten(),
            position_N=newest.position_T,
            window_rows_NW=window_rows(newest, cache.spec.sliding_window, cache.shape.batch_size),
            first=first,
        )
        drafted = self._model.draft_step(step, Scratch(cache))
        self._streams_NMD = drafted.streams_NMD
        logits_BFV: torch.Tensor = drafted.logits_NV.unflatten(0, (num_trees, width))
        return logits_BFV


class DSparkDeviceSteps:
    """A DSpark head's blocks: the place at depth d drafts the children of the nodes at depth d."""

    def __init__(
        self, model: TargetModel, cache: Cache, rows_B: torch.Tensor, roots_B: torch.Tensor, length_B: torch.Tensor
    ) -> None:
        self._model, self._cache, self._rows_B, self._roots_B = model, cache, rows_B, roots_B
        self._length_B, self._depth = length_B, 0
        self._logits_BSV = rows_B.new_empty(0)

    def root(self) -> torch.Tensor:
        """See `DeviceSteps`."""
        cache, size, window = self._cache, self._model.draft_block_size, self._cache.spec.sliding_window
        device, num_trees = self._rows_B.device, len(self._rows_B)
        length_B1, slot_W = self._length_B.unsqueeze(1), torch.arange(window, device=device)
        ring_BW = torch.where(slot_W < length_B1, self._rows_B.unsqueeze(1) * window + slot_W, -1)
        own_BS = torch.arange(num_trees * size, device=device).view(num_trees, size) + cache.num_persistent("head_kv")
        block = DraftBlock(
            roots_B=self._roots_B,
            position_N=(length_B1 + torch.arange(size, device=device)).flatten(),
            rows_NW=torch.cat((ring_BW, own_BS), dim=1).repeat_interleave(size, dim=0),
        )
        self._logits_BSV = self._model.draft_block(block, Scratch(cache)).logits_BSV
        return self._laws(self._roots_B.unsqueeze(1))

    def descend(self, token_BF: torch.Tensor, parent_BF: torch.Tensor) -> torch.Tensor:
        """See `DeviceSteps`. All that a place knows of its node's path is the node's own token."""
        self._depth += 1
        return self._laws(token_BF)

    def _laws(self, token_BF: torch.Tensor) -> torch.Tensor:
        bias_BFV = self._model.draft_bias(token_BF.flatten()).unflatten(0, token_BF.shape)
        logits_BFV: torch.Tensor = self._logits_BSV[:, self._depth, None] + bias_BFV
        return logits_BFV
