"""DeepSeek-V4 over a plan that only the device knows: the same arithmetic as the modules', with no read-back.

T = nodes, V = vocabulary, M = residual streams, D = model width, R = pool rows, E = entry width, G = output groups
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from compressed_spec.cache import Cache
from compressed_spec.models.deepseek_v4.attention import Attention
from compressed_spec.models.deepseek_v4.block import Block, MoE
from compressed_spec.models.deepseek_v4.compressor import Compressor, Indexer, compression_of
from compressed_spec.models.deepseek_v4.device_plan import DevicePlan
from compressed_spec.models.deepseek_v4.layer_ops import BlockInput, LayerOps
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.modules import HyperConnected
from compressed_spec.models.deepseek_v4.quantized import QuantizedMoE
from compressed_spec.models.deepseek_v4.rope import Rotation, rotation
from compressed_spec.rows import CompressionPlan

# Kernels that a layer launches, with Triton operations, quantised weights, bfloat16 and scored entries, as counted by
# tests/test_launches.py. Where few nodes leave the chip idle, lists and sums of FP8 products are cut into parts, and
# each such kernel is followed by another.
KERNELS_A_LAYER = {"sliding": 30, "hca": 37, "csa": 51}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Round:
    """A plan with its rotations: of nodes, plain and with compression, the sines that undo them, and of entries.

    entry_rows: rows of a compression's pools that the entries go to, -1 for none.
    """

    plan: DevicePlan
    main: Rotation
    compress: Rotation
    undo_main: torch.Tensor
    undo_compress: torch.Tensor
    entries: dict[str, Rotation]
    entry_rows: dict[str, torch.Tensor]


class DeviceForward:
    """Runs a model's layers on the scratch rows of a cache. Nodes have slots 0 .. T, and one slot more must be free."""

    def __init__(self, model: DeepseekV4, cache: Cache, ops: LayerOps) -> None:
        assert model.group.size == 1, "a model that several processes share has no device rounds yet"
        self.model, self.cache, self.ops = model, cache, ops
        self.eps = model.config.rms_norm_eps

    def __call__(self, plan: DevicePlan) -> torch.Tensor:
        """The streams `[T, M, D]` after the last layer; writes all scratch rows of the nodes."""
        assert len(plan.tokens_T) < self.cache.shape.num_slots, "the last slot takes what is written to nothing"
        model = self.model
        compress = model.get_buffer("rope_compress")
        main, turned = rotation(model.get_buffer("rope_main"), plan.position_T), rotation(compress, plan.position_T)
        here = _Round(
            plan=plan,
            main=main,
            compress=turned,
            undo_main=main.inverse.sin_NP,
            undo_compress=turned.inverse.sin_NP,
            entries={name: rotation(compress, comp.entry_position_C) for name, comp in plan.compressions.items()},
            entry_rows={name: self._entry_rows(name, comp) for name, comp in plan.compressions.items()},
        )
        streams_TMD: torch.Tensor = model.embed(plan.tokens_T).unsqueeze(1).repeat(1, model.config.hc_mult, 1)
        for layer in range(len(model.layers)):
            streams_TMD = self.layer(layer, streams_TMD, here)
        self._head_rows(streams_TMD, here)
        return streams_TMD

    def _entry_rows(self, name: str, comp: CompressionPlan) -> torch.Tensor:
        persistent = self.cache.num_persistent(f"compressed_kv.{name}")  # and of index_kv, if there is one
        return torch.where(comp.closing_slot_C < 0, -1, persistent + comp.closing_slot_C)

    def logits(self, streams_TMD: torch.Tensor) -> torch.Tensor:
        """Next-token logits `[T, V]`, float32 or wider."""
        return self.model.logits(streams_TMD)

    def layer(self, layer: int, streams_TMD: torch.Tensor, here: _Round) -> torch.Tensor:
        """One block."""
        block, ops = self.model.layers[layer], self.ops
        assert isinstance(block, Block)
        mixed = self._mix(block, "attn", streams_TMD)
        x_TD = ops.rms_norm(mixed.x_TD, block.attn_norm.weight, self.eps)
        streams_TMD = ops.expand(self._attention(layer, block.attn, x_TD, here), streams_TMD, mixed.weights)
        mixed = self._mix(block, "ffn", streams_TMD)
        x_TD = ops.rms_norm(mixed.x_TD, block.ffn_norm.weight, self.eps)
        return ops.expand(self._experts(block.ffn, x_TD, here.plan.tokens_T), streams_TMD, mixed.weights)

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

    def _scratch(self, pool: str, layer: int, count: int) -> torch.Tensor:
        """A pool's first scratch rows."""
        persistent = self.cache.num_persistent(pool)
        return self.cache.pools[pool][layer][persistent : persistent + count]

    def _attention(self, layer: int, attn: Attention, x_TD: torch.Tensor, here: _Round) -> torch.Tensor:
        ops = self.ops
        kind = compression_of(self.model.config, self.model.config.layers[layer])
        turn = here.main if kind is None else here.compress
        qr_TD = ops.rms_norm(attn.wq_a(x_TD), attn.q_norm.weight, self.eps)
        q_THD = attn.wq_b(qr_TD).unflatten(-1, (attn.num_heads, attn.head_dim))
        q_THD = ops.norm_rope(q_THD, None, self.eps, turn.cos_NP, turn.sin_NP)
        self._write_kv("window_kv", attn.layer, attn, x_TD, turn)

        entries_RE, rows_TK = None, None
        if kind is not None:
            assert attn.compressor is not None
            comp = here.plan.compressions[kind.name]
            x_wide = x_TD.to(self.model.precision.wide)
            entries_RE = self._compress(attn.compressor, attn.compressed_layer, x_wide, kind.name, here)
            rows_TK = comp.listed_TK
            if attn.indexer is not None:
                keys_RI = self._compress(attn.indexer.compressor, attn.compressed_layer, x_wide, kind.name, here)
                if rows_TK is None:
                    spans_B4 = here.plan.spans[kind.name]
                    rows_TK = self._choose(attn.indexer, x_TD, qr_TD, turn, comp, spans_B4, keys_RI)
        window_RD = self.cache.pools["window_kv"][attn.layer]
        o_THD = ops.attention(q_THD, window_RD, here.plan.window_rows_TW, entries_RE, rows_TK, attn.attn_sink)
        o_THD = ops.apply_rope(o_THD, turn.cos_NP, here.undo_main if kind is None else here.undo_compress)
        o_TGD = o_THD.flatten(1).unflatten(-1, (attn.groups, -1))
        low_TGR = torch.einsum("tgd,god->tgo", o_TGD, attn.wo_a.weight.unflatten(0, (attn.groups, -1)))
        output_TD: torch.Tensor = attn.wo_b(low_TGR.flatten(1))
        return output_TD

    def _write_kv(self, pool: str, layer: int, attn: Attention, x_TD: torch.Tensor, turn: Rotation) -> None:
        """The rotated K = V row of each node, into a pool's scratch rows."""
        kv_T1D, rows_TD = attn.wkv(x_TD).unsqueeze(1), self._scratch(pool, layer, len(x_TD))
        self.ops.norm_rope(kv_T1D, attn.kv_norm.weight, self.eps, turn.cos_NP, turn.sin_NP, out_NX=rows_TD)

    def _compress(
        self, module: Compressor, layer: int, x_wide: torch.Tensor, compression: str, here: _Round
    ) -> torch.Tensor:
        """Raw rows and new entries of the nodes; all entry rows of the layer `[R, E]`."""
        comp, turn = here.plan.compressions[compression], here.entries[compression]
        width = module.wkv.out_features
        raw = self._scratch(module.buffer_pool, layer, len(x_wide))
        raw[:, :width].copy_(F.linear(x_wide, module.wkv.weight))
        raw[:, width:].copy_(torch.addmm(module.ape[comp.phase_T], x_wide, module.wgate.weight.T))
        entries_RE = self.cache.pools[module.entry_pool][layer]
        if len(comp.closing_slot_C):
            self.ops.pool_entries(
                self.cache.pools[module.buffer_pool][layer],
                comp.pool_rows_CS,
                module.norm.weight,
                self.eps,
                turn.cos_NP,
                turn.sin_NP,
                entries_RE,
                here.entry_rows[compression],
                overlap=module.overlap,
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
        scale = indexer.head_dim**-0.5 * indexer.num_heads**-0.5
        return self.ops.choose_rows(
            q_THI.to(wide), indexer.weights_proj(x_TD).to(wide) * scale, keys_RI, spans_B4, comp, indexer.topk
        )

    def _experts(self, ffn: MoE | QuantizedMoE, x_TD: torch.Tensor, tokens_T: torch.Tensor) -> torch.Tensor:
        routing = ffn.route(x_TD, tokens_T)
        # Unquantised experts over gathered weights: for tests and small models, not for speed.
        output_TD: torch.Tensor = ffn(x_TD, routing) if isinstance(ffn, QuantizedMoE) else ffn.few(x_TD, routing)
        return output_TD

    def _head_rows(self, streams_TMD: torch.Tensor, here: _Round) -> None:
        """Rows of an MTP head, as `DeepseekV4.finish` leaves them."""
        head, plan = self.model.mtp_head, here.plan
        if head is None:
            assert self.model.dspark_head is None, "DSpark heads are not carried on the device yet"
            return
        num_nodes = len(streams_TMD)
        self._scratch("pending_stream", 0, num_nodes).copy_(streams_TMD.flatten(1))
        previous = self.cache.pools["pending_stream"][0][plan.parent_stream_T]
        fused_TMD = head.fuse(previous.unflatten(-1, (self.model.config.hc_mult, -1)), self.model.embed(plan.tokens_T))
        x_TD = self.ops.rms_norm(self._mix(head, "attn", fused_TMD).x_TD, head.attn_norm.weight, self.eps)
        turn = rotation(self.model.get_buffer("rope_main"), plan.position_T - 1)
        self._write_kv("head_kv", 0, head.attn, x_TD, turn)
