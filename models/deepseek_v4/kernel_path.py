"""Rounds that the host plans, carried out by kernels: prefill, any tree, draft steps, layers that stop early.

T = nodes, N = draft nodes, M = residual streams, D = model width
"""

import torch

from compressed_spec.cache import Cache, Scratch
from compressed_spec.device_trees import DeviceRounds
from compressed_spec.kernels.commit import MoveRows
from compressed_spec.models.deepseek_v4.device_forward import Angles, DeviceForward, NodeRound
from compressed_spec.models.deepseek_v4.device_round import DeviceRound
from compressed_spec.models.deepseek_v4.graphs import CudaCapture, GraphedRounds, eager
from compressed_spec.models.deepseek_v4.layer_ops import LayerOps
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.rope import rotation
from compressed_spec.partial import LayerStreams
from compressed_spec.rows import RowPlan
from compressed_spec.target import DraftStep


class KernelPath:
    """A `LayerPath` of Triton's kernels; others than `triton_ops` are for tests."""

    def __init__(self, model: DeepseekV4, ops: LayerOps) -> None:
        self._model, self._ops = model, ops

    def advance(self, plan: RowPlan, scratch: Scratch, before: LayerStreams, num_layers: int) -> LayerStreams:
        """See `LayerPath`."""
        model, forward = self._model, DeviceForward(self._model, scratch.cache, self._ops)
        spans = {
            name: torch.tensor(comp.spans, dtype=torch.int64).to(model.device, non_blocking=True)
            for name, comp in plan.compressions.items()
            if comp.listed_TK is None
        }
        here = forward.round(plan, spans, plan.slot_T)
        read_by_head = () if model.dspark_head is None else model.dspark_head.settings.target_layer_ids
        kept = {layer: streams for layer, streams in before.streams.items() if layer in read_by_head}
        streams_TMD = before.newest
        for layer in range(before.num_layers, num_layers):
            streams_TMD = forward.layer(layer, streams_TMD, here)
            if layer in read_by_head:
                kept[layer] = streams_TMD
        return LayerStreams(num_layers=num_layers, streams=kept | {num_layers - 1: streams_TMD})

    def finish(self, plan: RowPlan, scratch: Scratch, streams_TMD: torch.Tensor) -> None:
        """See `LayerPath`."""
        DeviceForward(self._model, scratch.cache, self._ops).head_rows(streams_TMD, plan, plan.slot_T)

    def draft_step(self, step: DraftStep, scratch: Scratch) -> torch.Tensor:
        """See `LayerPath`."""
        model, head = self._model, self._model.mtp_head
        assert head is not None, "this model has no MTP head"
        here = NodeRound(
            tokens_T=step.tokens_N,
            window_rows_TW=step.window_rows_NW,
            slot_T=None,
            first=step.first,
            kv_pool="head_kv",
            angles={"": Angles.of(rotation(model.get_buffer("rope_main"), step.position_N))},
            compressions={},
            spans={},
            entries={},
            entry_rows={},
        )
        fused_NMD = head.fuse(step.streams_NMD, model.embed(step.tokens_N))
        return DeviceForward(model, scratch.cache, self._ops).block(head, fused_NMD, here)

    def row_mover(self) -> MoveRows:
        """See `LayerPath`."""
        from compressed_spec.kernels.commit_triton import RowMover

        return RowMover()

    def rounds(self, cache: Cache) -> DeviceRounds | None:
        """See `LayerPath`: CUDA graphs on a GPU. None with several processes, and with a DSpark head."""
        if self._model.group.size > 1 or self._model.dspark_head is not None:
            return None
        device_round = DeviceRound(DeviceForward(self._model, cache, self._ops))
        return GraphedRounds(device_round, CudaCapture() if cache.device.type == "cuda" else eager)
