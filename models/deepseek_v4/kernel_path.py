"""Rounds that the host plans, carried out by kernels: prefill, any tree, draft steps, layers that stop early.

T = nodes, N = draft nodes, M = residual streams, D = model width
"""

import torch

from compressed_spec.cache import Cache, Scratch
from compressed_spec.device_trees import DeviceRounds
from compressed_spec.kernels.commit import MoveRows
from compressed_spec.kernels.triton_device import launching_on
from compressed_spec.models.deepseek_v4.device_forward import Angles, DeviceForward, NodeRound
from compressed_spec.models.deepseek_v4.device_round import DeviceRound
from compressed_spec.models.deepseek_v4.graphs import CudaCapture, GraphedRounds, eager
from compressed_spec.models.deepseek_v4.layer_ops import LayerOps
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.rope import rotation
from compressed_spec.partial import LayerStreams
from compressed_spec.rows import RowPlan
from compressed_spec.target import DraftBlock, DraftStep


class KernelPath:
    """A `LayerPath` of Triton's kernels; others than `triton_ops` are for tests."""

    def __init__(self, model: DeepseekV4, ops: LayerOps) -> None:
        self._model, self._ops = model, ops

    def advance(self, plan: RowPlan, scratch: Scratch, before: LayerStreams, num_layers: int) -> LayerStreams:
        """See `LayerPath`."""
        forward = DeviceForward(self._model, scratch.cache, self._ops)
        spans = {
            name: torch.tensor(comp.spans, dtype=torch.int64).to(self._model.device, non_blocking=True)
            for name, comp in plan.compressions.items()
            if comp.listed_TK is None
        }
        with launching_on(self._model.device):
            return forward.layers(before, num_layers, forward.round(plan, spans, plan.slot_T))

    def finish(self, plan: RowPlan, scratch: Scratch, after: LayerStreams) -> None:
        """See `LayerPath`."""
        with launching_on(self._model.device):
            DeviceForward(self._model, scratch.cache, self._ops).head_rows(after, plan, plan.slot_T)

    def draft_step(self, step: DraftStep, scratch: Scratch) -> torch.Tensor:
        """See `LayerPath`."""
        model, head = self._model, self._model.mtp_head
        assert head is not None, "this model has no MTP head"
        here = self._head_round(step.tokens_N, step.position_N, step.window_rows_NW, step.first)
        with launching_on(model.device):
            fused_NMD = head.fuse(step.streams_NMD, model.embed(step.tokens_N))
            return DeviceForward(model, scratch.cache, self._ops).block(head, fused_NMD, here)

    def draft_hidden(self, tokens_N: torch.Tensor, block: DraftBlock, scratch: Scratch) -> torch.Tensor:
        """See `LayerPath`."""
        model, head = self._model, self._model.dspark_head
        assert head is not None, "this model has no DSpark head"
        here = self._head_round(tokens_N, block.position_N, block.rows_NW, 0)
        streams_NMD = model.embed(tokens_N).unsqueeze(1).repeat(1, model.config.hc_mult, 1)
        with launching_on(model.device):
            for stage in head.stages:
                streams_NMD = DeviceForward(model, scratch.cache, self._ops).block(stage, streams_NMD, here)
        return head.stages[-1].collapse_head(streams_NMD)

    def _head_round(
        self, tokens_N: torch.Tensor, position_N: torch.Tensor, rows_NW: torch.Tensor, first: int
    ) -> NodeRound:
        """Nodes of a draft head, which does not compress."""
        return NodeRound(
            tokens_T=tokens_N,
            window_rows_TW=rows_NW,
            slot_T=None,
            first=first,
            kv_pool="head_kv",
            angles={"": Angles.of(rotation(self._model.get_buffer("rope_main"), position_N))},
            compressions={},
            spans={},
            entries={},
            entry_rows={},
        )

    def row_mover(self) -> MoveRows:
        """See `LayerPath`."""
        from compressed_spec.kernels.commit_triton import RowMover

        return RowMover()

    def rounds(self, cache: Cache) -> DeviceRounds | None:
        """See `LayerPath`: CUDA graphs on a GPU. None with several processes."""
        if self._model.group.size > 1:
            return None
        device_round = DeviceRound(DeviceForward(self._model, cache, self._ops))
        return GraphedRounds(device_round, CudaCapture() if cache.device.type == "cuda" else eager)
