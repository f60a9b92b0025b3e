"""DeepSeek-V4's layers by kernels: the same arithmetic as the modules', with no read-back.

T = nodes, V = vocabulary, M = residual streams, D = model width, R = pool rows, E = entry width, G = output groups
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from compressed_spec.cache import Cache
from compressed_spec.kernels.stored_experts import StoredExperts
from compressed_spec.models.deepseek_v4.attention import Attention
from compressed_spec.models.deepseek_v4.block import Block, MoE
from compressed_spec.models.deepseek_v4.compressor import Compressor, Indexer
from compressed_spec.models.deepseek_v4.device_plan import DevicePlan
from compressed_spec.models.deepseek_v4.dspark import DSparkHead
from compressed_spec.models.deepseek_v4.layer_ops import BlockInput, LayerOps
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.modules import HyperConnected
from compressed_spec.models.deepseek_v4.quantized import QuantizedMoE
from compressed_spec.models.deepseek_v4.rope import Rotation, rotation
from compressed_spec.partial import LayerStreams
from compressed_spec.rows import CompressionPlan, RowPlan

# Kernels that a layer launches, with Triton operations, quantised weights, bfloat16 and scored entries, as counted by
# tests/test_launches.py. Where few nodes leave the chip idle, lists and sums of FP8 products are cut into parts, and
# each such kernel is followed by another.
KERNELS_A_LAYER = {"sliding": 29, "hca": 36, "csa": 50}


@dataclass(frozen=True, slots=True, kw_only=True)
class Angles:
    """A rotation, and the sines that undo it."""

    turn: Rotation
    undo_sin: torch.Tensor

    @classmethod
    def of(cls, turn: Rotation) -> "Angles":
        return cls(turn=turn, undo_sin=turn.inverse.sin_NP)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRound:
    """What a layer needs of a round. `first`: scratch row of the first node where slot_T is None, else slot_T says.

    angles: of the nodes, by compression, "" for layers without. entries: those of entries that close. entry_rows: rows
    of a compression's pools that the entries go to, -1 for none. kv_pool: where window rows go.
    """

    tokens_T: torch.Tensor
    window_rows_TW: torch.Tensor
    slot_T: torch.Tensor | None
    first: int
    kv_pool: str
    angles: Mapping[str, Angles]
    compressions: Mapping[str, CompressionPlan]
    spans: Mapping[str, torch.Tensor]
    entries: Mapping[str, Rotation]
    entry_rows: Mapping[str, torch.Tensor]


class DeviceForward:
    """Runs a model's layers on the scratch rows of a cache."""

    def __init__(self, model: DeepseekV4, cache: Cache, ops: LayerOps) -> None:
        self.model, self.cache, self.ops = model, cache, ops
        self.eps = model.config.rms_norm_eps

    def __call__(self, plan: DevicePlan) -> torch.Tensor:
        """The streams `[T, M, D]` after the last layer; writes all scratch rows of the nodes (slots 0 .. T)."""
        num_slots = len(plan.tokens_T) + self.ops.spare_slots
        assert num_slots <= self.cache.shape.num_slots, "the last slot takes what is written to nothing"
        here = self.round(plan, plan.spans, None)
        streams_TMD = self.model.embed(plan.tokens_T).unsqueeze(1).repeat(1, self.model.config.hc_mult, 1)
        before = LayerStreams(num_layers=0, streams={-1: streams_TMD})
        after = self.layers(before, len(self.model.layers), here)
        self.head_rows(after, plan, None)
        return after.newest

    def layers(self, before: LayerStreams, num_layers: int, here: NodeRound) -> LayerStreams:
        """On through the layers up to `num_layers`; keeps what a DSpark head reads as well."""
        read_by_head = self.model.layers_read_by_head
        kept = {layer: streams for layer, streams in before.streams.items() if layer in read_by_head}
        streams_TMD = before.newest
        for layer in range(before.num_layers, num_layers):
            streams_TMD = self.layer(layer, streams_TMD, here)
            if layer in read_by_head:
                kept[layer] = streams_TMD
        return LayerStreams(num_layers=num_layers, streams=kept | {num_layers - 1: streams_TMD})

    def round(
        self, plan: DevicePlan | RowPlan, spans: Mapping[str, torch.Tensor], slot_T: torch.Tensor | None
    ) -> NodeRound:
        """What the layers share. spans: of compressions whose entries are chosen, see `DevicePlan`."""
        compress = self.model.get_buffer("rope_compress")
        turned = Angles.of(rotation(compress, plan.position_T)) if plan.compressions else None
        main = Angles.of(rotation(self.model.get_buffer("rope_main"), plan.position_T))
        return NodeRound(
            tokens_T=plan.tokens_T,
            window_rows_TW=plan.window_rows_TW,
            slot_T=slot_T,
            first=0,
            kv_pool="window_kv",
            angles={"": main} | ({} if turned is None else dict.fromkeys(plan.compressions, turned)),
            compressions=plan.compressions,
            spans=spans,
            entries={name: rotation(compress, comp.entry_position_C) for name, comp in plan.compressions.items()},
            entry_rows={name: self._entry_rows(name, comp) for name, comp in plan.compressions.items()},
        )

    def _entry_rows(self, name: str, comp: CompressionPlan) -> torch.Tensor:
        persistent = self.cache.num_persistent(f"compressed_kv.{name}")  # and of index_kv, if there is one
        return torch.where(comp.closing_slot_C < 0, -1, persistent + comp.closing_slot_C)

    def logits(self, streams_TMD: torch.Tensor) -> torch.Tensor:
        """Next-token logits `[T, V]`, float32 or wider."""
        return self.model.logits(streams_TMD)

    def layer(self, layer: int, streams_TMD: torch.Tensor, here: NodeRound) -> torch.Tensor:
        """One layer of the stack."""
        block = self.model.layers[layer]
        assert isinstance(block, Block)
        return self.block(block, streams_TMD, here)

    def block(self, block: Block, streams_TMD: torch.Tensor, here: NodeRound) -> torch.Tensor:
        """One block, of the stack or of a draft head."""
        ops = self.ops
        mixed = self._mix(block, "attn", streams_TMD)
        x_TD = ops.rms_norm(mixed.x_TD, block.attn_norm.weight, self.eps)
        streams_TMD = ops.expand(self._attention(block.attn, x_TD, here), streams_TMD, mixed.weights)
        mixed = self._mix(block, "ffn", streams_TMD)
        x_TD = ops.rms_norm(mixed.x_TD, block.ffn_norm.weight, self.eps)
        return ops.expand(self._experts(block.ffn, x_TD, here.tokens_T), streams_TMD, mixed.weights)

    def _mix(self, block: HyperConnected, site: str, streams_TMD: torch.Tensor) -> BlockInput:
        config = self.model.config
        return self.ops.mix_and_collapse(
            streams_TMD,
            block.get_parameter(f"hc_{site}_fn"),
            block.get_parameter(f"hc_{site}_scale"),
            block.get_parameter(f"hc_{site}_base"),
            iterations=config.hc_sinkhorn_iters,
            eps=config.hc_eps,
            norm_eps=self.eps,
        )

    def _scratch(self, pool: str, layer: int, first: int, count: int) -> torch.Tensor:
        """Scratch rows of a pool that lie one after the other."""
        start = self.cache.num_persistent(pool) + first
        return self.cache.pools[pool][layer][start : start + count]

    def _attention(self, attn: Attention, x_TD: torch.Tensor, here: NodeRound) -> torch.Tensor:
        ops, kind = self.ops, "" if attn.compressor is None else attn.compressor.compression
        angles = here.angles[kind]
        turn = angles.turn
        qr_TD = ops.rms_norm(attn.wq_a(x_TD), attn.q_norm.weight, self.eps)
        q_THD = attn.wq_b(qr_TD).unflatten(-1, (attn.num_heads, attn.head_dim))
        q_THD = ops.norm_rope(q_THD, None, self.eps, turn.cos_NP, turn.sin_NP)
        self._write_kv(here.kv_pool, attn, x_TD, turn, here.first, here.slot_T)

        entries_RE, rows_TK = None, None
        if attn.compressor is not None:
            comp = here.compressions[kind]
            x_wide = x_TD.to(self.model.precision.wide)
            entries_RE = self._compress(attn.compressor, attn.compressed_layer, x_wide, here)
            rows_TK = comp.listed_TK
            if attn.indexer is not None:
                keys_RI = self._compress(attn.indexer.compressor, attn.compressed_layer, x_wide, here)
                if rows_TK is None:
                    rows_TK = self._choose(attn.indexer, x_TD, qr_TD, turn, comp, here.spans[kind], keys_RI)
        window_RD = self.cache.pools[here.kv_pool][attn.layer]
        o_THD = ops.attention(q_THD, window_RD, here.window_rows_TW, entries_RE, rows_TK, attn.attn_sink, attn.rope_dim)
        o_THD = ops.apply_rope(o_THD, turn.cos_NP, angles.undo_sin)
        o_TGD = o_THD.flatten(1).unflatten(-1, (attn.groups, -1))
        return attn.group.all_reduce(attn.wo_b(attn.wo_a.grouped(o_TGD).flatten(1)))

    def _write_kv(
        self, pool: str, attn: Attention, x_TD: torch.Tensor, turn: Rotation, first: int, slot_T: torch.Tensor | None
    ) -> None:
        """The rotated K = V row of each node, into a pool's scratch rows."""
        kv_T1D, rows_RD = attn.wkv(x_TD).unsqueeze(1), self.cache.pools[pool][attn.layer]
        if slot_T is None:
            rows_TD = self._scratch(pool, attn.layer, first, len(x_TD))
        else:
            rows_TD = rows_RD.new_empty(len(x_TD), rows_RD.shape[1])
        self.ops.norm_rope(kv_T1D, attn.kv_norm.weight, self.eps, turn.cos_NP, turn.sin_NP, out_NX=rows_TD)
        if slot_T is not None:
            rows_RD[self.cache.num_persistent(pool) :].index_copy_(0, slot_T, rows_TD)

    def _compress(self, module: Compressor, layer: int, x_wide: torch.Tensor, here: NodeRound) -> torch.Tensor:
        """Raw rows and new entries of the nodes; all entry rows of the layer `[R, E]`."""
        comp, turn = here.compressions[module.compression], here.entries[module.compression]
        width, pool = module.wkv.out_features, module.buffer_pool
        buffer_RD = self.cache.pools[pool][layer]
        if here.slot_T is None:
            raw = self._scratch(pool, layer, here.first, len(x_wide))
        else:
            raw = buffer_RD.new_empty((len(x_wide), 2 * width))
        raw[:, :width].copy_(F.linear(x_wide, module.wkv.weight))
        raw[:, width:].copy_(torch.addmm(module.ape[comp.phase_T], x_wide, module.wgate.weight.T))
        if here.slot_T is not None:
            buffer_RD[self.cache.num_persistent(pool) :].index_copy_(0, here.slot_T, raw)
        entries_RE = self.cache.pools[module.entry_pool][layer]
        if len(comp.closing_slot_C):
            self.ops.pool_entries(
                buffer_RD,
                comp.pool_rows_CS,
                module.norm.weight,
                self.eps,
                turn.cos_NP,
                turn.sin_NP,
                entries_RE,
                here.entry_rows[module.compression],
                overlap=module.overlap,
                dtype=self.model.precision.dtype,
            )
        return entries_RE

    def _choose(
        self,
        indexer: Indexer,
        x_TD: torch.Tensor,
        qr_TD: torch.Tensor,
        turn: Rotation,
        comp: CompressionPlan,
        spans_B4: torch.Tensor,
        keys_RI: torch.Tensor,
    ) -> torch.Tensor:
        """Rows of the entries that the nodes attend to."""
        wide = self.model.precision.wide
        q_THI = indexer.wq_b(qr_TD).unflatten(-1, (indexer.num_heads, indexer.head_dim))
        q_THI = self.ops.apply_rope(q_THI, turn.cos_NP, turn.sin_NP)
        weights_TH = indexer.weights_proj(x_TD).to(wide) * indexer.scale
        scores_TN = self.ops.index_scores(q_THI.to(wide), weights_TH, keys_RI, spans_B4, comp)
        return self.ops.choose_rows(indexer.group.all_reduce(scores_TN), comp, indexer.topk)

    def _experts(self, ffn: MoE | QuantizedMoE, x_TD: torch.Tensor, tokens_T: torch.Tensor) -> torch.Tensor:
        routing = ffn.route(x_TD, tokens_T)
        if isinstance(ffn, QuantizedMoE) or ffn.group.size > 1:
            output_TD: torch.Tensor = ffn(x_TD, routing)
            return output_TD
        experts = StoredExperts(w13=ffn.experts.w13, w13_scale=None, w2=ffn.experts.w2, w2_scale=None)
        return self.ops.experts(x_TD, routing, experts, ffn.limit, ffn.shared_experts(x_TD))

    def head_rows(self, after: LayerStreams, plan: DevicePlan | RowPlan, slot_T: torch.Tensor | None) -> None:
        """Rows of a draft head, if there is one, as `DeepseekV4.finish` leaves them."""
        streams_TMD, head, pool = after.newest, self.model.mtp_head, "pending_stream"
        if self.model.dspark_head is not None:
            self._dspark_rows(self.model.dspark_head, after, plan, slot_T)
        if head is None:
            return
        pending_RD = self.cache.pools[pool][0]
        if slot_T is None:
            self._scratch(pool, 0, 0, len(streams_TMD)).copy_(streams_TMD.flatten(1))
        else:
            pending_RD[self.cache.num_persistent(pool) :].index_copy_(0, slot_T, streams_TMD.flatten(1))
        previous = pending_RD[plan.parent_stream_T]
        fused_TMD = head.fuse(previous.unflatten(-1, (self.model.config.hc_mult, -1)), self.model.embed(plan.tokens_T))
        x_TD = self.ops.rms_norm(self._mix(head, "attn", fused_TMD).x_TD, head.attn_norm.weight, self.eps)
        turn = rotation(self.model.get_buffer("rope_main"), plan.position_T - 1)
        self._write_kv("head_kv", head.attn, x_TD, turn, 0, slot_T)

    def _dspark_rows(
        self, head: DSparkHead, after: LayerStreams, plan: DevicePlan | RowPlan, slot_T: torch.Tensor | None
    ) -> None:
        first = head.stages[0]
        main_hidden = [after.streams[layer].mean(dim=1) for layer in head.settings.target_layer_ids]
        main_TD = first.main_proj(torch.cat(main_hidden, dim=-1))
        main_TD = self.ops.rms_norm(main_TD, first.main_norm.weight, self.eps)
        turn = rotation(self.model.get_buffer("rope_main"), plan.position_T)
        for stage in head.stages:
            self._write_kv("head_kv", stage.attn, main_TD, turn, 0, slot_T)
