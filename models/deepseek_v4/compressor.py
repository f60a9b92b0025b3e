"""What a compressing layer keeps of the past, and how CSA's indexer chooses from it (DeepSeek-V4 reference, 3.5, 3.6).

T = nodes, D = model width, E = entry width, R = pool rows, C = windows that close, S = tokens one entry pools,
H = index heads, I = index head width, K = entries chosen, N = entries in sight, X = those closed in this round
"""

from dataclasses import dataclass

import torch
from torch import nn

from compressed_spec.cache import Scratch
from compressed_spec.kernels.compress import pool_windows
from compressed_spec.kernels.indexer import gathered_index_scores, select_entries
from compressed_spec.kernels.rope import apply_rope
from compressed_spec.layer_scratch import LayerScratch
from compressed_spec.layout import Compression
from compressed_spec.models.deepseek_v4.config import AttentionKind, DeepseekV4Config, LayerSpec
from compressed_spec.models.deepseek_v4.modules import Linear, Norm, Precision
from compressed_spec.models.deepseek_v4.rope import Rotation
from compressed_spec.parallel import ParallelGroup
from compressed_spec.rows import CompressionPlan, Reach, selected_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressionRound:
    """One compression in this round: its rows, and the rotation of the entries that close."""

    plan: CompressionPlan
    entries: Rotation


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
        self.overlap, self.rope_dim, self.compression = comp.overlap, config.qk_rope_head_dim, comp.name
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

    def raw(self, x_TD: torch.Tensor, phase_T: torch.Tensor) -> torch.Tensor:
        """Each node's raw row: kv, then the gate with its position bias."""
        x_wide = x_TD.to(self.precision.wide)
        return torch.cat((self.wkv(x_wide), self.wgate(x_wide) + self.ape[phase_T]), dim=-1)

    def pool(self, buffer_RD: torch.Tensor, rows_CS: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """The entries `[C, E]` of windows that close."""
        pooled_CE = pool_windows(buffer_RD, rows_CS, overlap=self.overlap).to(self.precision.dtype)
        return apply_rope(self.norm(pooled_CE).unsqueeze(1), rotation.cos_NP, rotation.sin_NP).squeeze(1)

    def write(
        self, raw_TD: torch.Tensor, compression: CompressionRound, scratch: Scratch | LayerScratch, layer: int
    ) -> torch.Tensor:
        """Write the raw rows and the new entries of these nodes; returns all entry rows of the layer `[R, E]`."""
        plan = compression.plan
        buffer_RD = scratch.write(self.buffer_pool, layer, raw_TD)
        if isinstance(scratch, Scratch) and not len(plan.closing_slot_C):
            return scratch.rows(self.entry_pool, layer)
        entries_CE = self.pool(buffer_RD, plan.pool_rows_CS, compression.entries)
        return scratch.write(self.entry_pool, layer, entries_CE, slots=plan.closing_slot_C)


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
        scores_TN = self.precision.numerics.index_scores(
            self._queries(qr_TD, rotation),
            self._weights(x_TD),
            keys_RI,
            plan.spans,
            plan.reach.extra_rows_TX,
            plan.num_visible,
        )
        return selected_rows(plan.reach, select_entries(self.group.all_reduce(scores_TN), self.topk))

    def few(
        self, x_TD: torch.Tensor, qr_TD: torch.Tensor, rotation: Rotation, reach: Reach, keys_RI: torch.Tensor
    ) -> torch.Tensor:
        """`forward` of few nodes: each gathers the keys in its sight, of which there must be more than K in all.

        The operations do not depend on lengths.
        """
        torch._check(reach.entry_N.shape[0] > self.topk)
        rows_TN = selected_rows(reach, reach.entry_N.expand(x_TD.shape[0], -1))
        scores_TN = gathered_index_scores(self._queries(qr_TD, rotation), self._weights(x_TD), keys_RI, rows_TN)
        return selected_rows(reach, select_entries(scores_TN, self.topk))

    def _queries(self, qr_TD: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        q_THI: torch.Tensor = self.wq_b(qr_TD).unflatten(-1, (self.num_heads, self.head_dim))
        return apply_rope(q_THI, rotation.cos_NP, rotation.sin_NP).to(self.precision.wide)

    def _weights(self, x_TD: torch.Tensor) -> torch.Tensor:
        weights_TH: torch.Tensor = self.weights_proj(x_TD)
        return weights_TH.to(self.precision.wide).mul(self.scale)
