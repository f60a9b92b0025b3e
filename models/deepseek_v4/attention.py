"""Window, CSA and HCA attention over rows (sections 3.3, 3.5 and 3.6 of the DeepSeek-V4 reference).

T = nodes, D = model width, H = heads, E = entry width, G = output groups, R = pool rows, K = entries listed
"""

from dataclasses import dataclass

import torch
from torch import nn

from compressed_spec.cache import Scratch
from compressed_spec.kernels.compress import pool_windows
from compressed_spec.kernels.indexer import select_entries
from compressed_spec.kernels.norm import rms_norm
from compressed_spec.kernels.rope import apply_rope
from compressed_spec.layout import Compression
from compressed_spec.models.deepseek_v4.config import AttentionKind, DeepseekV4Config, LayerSpec
from compressed_spec.models.deepseek_v4.modules import Linear, Norm, Precision
from compressed_spec.models.deepseek_v4.rope import Rotation
from compressed_spec.parallel import ParallelGroup
from compressed_spec.rows import CompressionPlan, selected_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionRound:
    """One compression in this round: its rows, and the rotation of the entries that close."""

    plan: CompressionPlan
    entries: Rotation


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRound:
    """What an attention layer needs of a round: its rotation, its rows, and where to write.

    kv_pool: pool of its window rows; first: scratch row of the first node; compression: None for a sliding layer.
    """

    rotation: Rotation
    window_rows_TW: torch.Tensor
    scratch: Scratch
    kv_pool: str
    first: int
    compression: CompressionRound | None


def compression_of(config: DeepseekV4Config, layer: LayerSpec) -> Compression | None:
    """How a layer compresses (as the only layer that does), None for a sliding one."""
    if layer.kind is AttentionKind.SLIDING:
        return None
    csa = layer.kind is AttentionKind.CSA
    return Compression(
        ratio=layer.ratio,
        overlap=csa,
        num_layers=1,
        entry_dim=config.head_dim,
        index_dim=config.index_head_dim if csa else 0,
        index_topk=config.index_topk if csa else 0,
    )


class Compressor(nn.Module):
    """Projects each token to a raw row, and pools the windows that close into entries."""

    def __init__(
        self, config: DeepseekV4Config, comp: Compression, width: int, lane: str, precision: Precision
    ) -> None:
        super().__init__()
        self.overlap, self.rope_dim = comp.overlap, config.qk_rope_head_dim
        self.buffer_pool, self.entry_pool = (
            f"{lane}buffer.{comp.name}",
            f"index_kv.{comp.name}" if lane else f"compressed_kv.{comp.name}",
        )
        raw = width * (2 if comp.overlap else 1)
        self.ape = nn.Parameter(torch.empty(comp.ratio, raw, dtype=precision.wide))
        self.wkv = Linear(config.hidden_size, raw, precision, wide=True)
        self.wgate = Linear(config.hidden_size, raw, precision, wide=True)
        self.norm = Norm(width, config.rms_norm_eps, precision)
        self.precision = precision

    def forward(self, x_TD: torch.Tensor, compression: CompressionRound, scratch: Scratch, layer: int) -> torch.Tensor:
        """Write the raw rows and the new entries of these nodes; returns all entry rows of the layer `[R, E]`."""
        plan = compression.plan
        x_wide = x_TD.to(self.precision.wide)
        gate = self.wgate(x_wide) + self.ape[plan.phase_T]
        buffer_RD = scratch.write(self.buffer_pool, layer, torch.cat((self.wkv(x_wide), gate), dim=-1))
        pooled_CE = pool_windows(buffer_RD, plan.pool_rows_CS, overlap=self.overlap).to(self.precision.dtype)
        entries = apply_rope(self.norm(pooled_CE).unsqueeze(1), compression.entries.cos_NP, compression.entries.sin_NP)
        return scratch.write(self.entry_pool, layer, entries.squeeze(1), slots=plan.closing_slot_C)


class Indexer(nn.Module):
    """Scores compressed entries with small heads, this process's of which are here, and keeps the best."""

    def __init__(self, config: DeepseekV4Config, comp: Compression, precision: Precision, group: ParallelGroup) -> None:
        super().__init__()
        self.group, self.num_heads = group, group.part(config.index_n_heads)
        self.head_dim, self.topk = config.index_head_dim, config.index_topk
        self.scale = config.index_head_dim**-0.5 * config.index_n_heads**-0.5
        self.wq_b = Linear(config.q_lora_rank, self.num_heads * self.head_dim, precision)
        self.weights_proj = Linear(config.hidden_size, self.num_heads, precision)
        self.compressor = Compressor(config, comp, config.index_head_dim, "index_", precision)
        self.precision = precision

    def forward(
        self, x_TD: torch.Tensor, qr_TD: torch.Tensor, rotation: Rotation, plan: CompressionPlan, keys_RI: torch.Tensor
    ) -> torch.Tensor:
        """Rows of the chosen entries `[T, K]`, ascending by entry, -1 = nothing."""
        q_THI = apply_rope(
            self.wq_b(qr_TD).unflatten(-1, (self.num_heads, self.head_dim)), rotation.cos_NP, rotation.sin_NP
        )
        scores_TN = self.precision.numerics.index_scores(
            q_THI.to(self.precision.wide),
            self.weights_proj(x_TD).to(self.precision.wide) * self.scale,
            keys_RI,
            plan.spans,
            plan.extra_rows_TX,
            plan.num_visible,
        )
        return selected_rows(plan, select_entries(self.group.all_reduce(scores_TN), self.topk))


class Attention(nn.Module):
    """One attention layer, or the heads and output groups of it that are this process's.

    `layer` is its index among the window pools, `compressed_layer` among its compression's.
    """

    def __init__(
        self,
        config: DeepseekV4Config,
        spec: LayerSpec,
        layer: int,
        compressed_layer: int,
        precision: Precision,
        group: ParallelGroup,
    ) -> None:
        super().__init__()
        self.layer, self.compressed_layer, self.group = layer, compressed_layer, group
        self.num_heads, self.groups = group.part(config.num_attention_heads), group.part(config.o_groups)
        self.head_dim = config.head_dim
        self.eps, self.numerics = config.rms_norm_eps, precision.numerics
        heads_dim = self.num_heads * self.head_dim
        self.attn_sink = nn.Parameter(torch.empty(self.num_heads, dtype=precision.wide))
        self.wq_a = Linear(config.hidden_size, config.q_lora_rank, precision)
        self.q_norm = Norm(config.q_lora_rank, config.rms_norm_eps, precision)
        self.wq_b = Linear(config.q_lora_rank, heads_dim, precision)
        self.wkv = Linear(config.hidden_size, config.head_dim, precision)
        self.kv_norm = Norm(config.head_dim, config.rms_norm_eps, precision)
        self.wo_a = Linear(heads_dim // self.groups, self.groups * config.o_lora_rank, precision)
        self.wo_b = Linear(self.groups * config.o_lora_rank, config.hidden_size, precision)
        self.compressor: Compressor | None = None
        self.indexer: Indexer | None = None
        comp = compression_of(config, spec)
        if comp is not None:
            self.compressor = Compressor(config, comp, config.head_dim, "", precision)
            if comp.index_dim:
                self.indexer = Indexer(config, comp, precision, group)

    def kv(self, x_TD: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """The rotated K = V row of each node, `[T, head_dim]`."""
        kv_T1D = self.kv_norm(self.wkv(x_TD)).unsqueeze(1)
        return apply_rope(kv_T1D, rotation.cos_NP, rotation.sin_NP).squeeze(1)

    def forward(self, x_TD: torch.Tensor, here: AttentionRound) -> torch.Tensor:
        """Attention's output `[T, D]`; writes each node's rows."""
        cos, sin = here.rotation.cos_NP, here.rotation.sin_NP
        qr_TD = self.q_norm(self.wq_a(x_TD))
        q_THD = self.wq_b(qr_TD).unflatten(-1, (self.num_heads, self.head_dim))
        q_THD = apply_rope(rms_norm(q_THD, None, self.eps), cos, sin)
        window_RD = here.scratch.write(here.kv_pool, self.layer, self.kv(x_TD, here.rotation), here.first)

        entries_RE, rows_TK = None, None
        if here.compression is not None:
            assert self.compressor is not None
            plan, layer = here.compression.plan, self.compressed_layer
            entries_RE = self.compressor(x_TD, here.compression, here.scratch, layer)
            rows_TK = plan.listed_TK
            if self.indexer is not None:
                # Keys are kept even while every entry is chosen anyway: a longer context will score them.
                keys_RI = self.indexer.compressor(x_TD, here.compression, here.scratch, layer)
                if rows_TK is None:
                    rows_TK = self.indexer(x_TD, qr_TD, here.rotation, plan, keys_RI)

        o_THD = self.numerics.attention(q_THD, window_RD, here.window_rows_TW, entries_RE, rows_TK, self.attn_sink)
        undo = here.rotation.inverse
        o_TGD = apply_rope(o_THD, undo.cos_NP, undo.sin_NP).flatten(1).unflatten(-1, (self.groups, -1))
        low_TGR = self.numerics.grouped_linear(o_TGD, self.wo_a.weight.unflatten(0, (self.groups, -1)))
        return self.group.all_reduce(self.wo_b(low_TGR.flatten(1)))
