"""Window, CSA and HCA attention over rows (sections 3.3, 3.5 and 3.6 of the DeepSeek-V4 reference).

Three parts: `project` and `attend` are functions of tensors alone, so that they may be compiled; `write` between them
stores the nodes' rows.

T = nodes, D = model width, H = heads, E = entry width, G = output groups, R = pool rows, K = entries listed
"""

from dataclasses import dataclass

import torch
from torch import nn

from compressed_spec.cache import Scratch
from compressed_spec.kernels.norm import rms_norm
from compressed_spec.kernels.rope import apply_rope
from compressed_spec.layer_scratch import LayerScratch
from compressed_spec.models.deepseek_v4.compressor import CompressionRound, Compressor, Indexer, compression_of
from compressed_spec.models.deepseek_v4.config import DeepseekV4Config, LayerSpec
from compressed_spec.models.deepseek_v4.modules import Linear, Norm, Precision
from compressed_spec.models.deepseek_v4.rope import Rotation
from compressed_spec.parallel import ParallelGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRound:
    """What an attention layer needs of a round: its rotation, its rows, and where to write.

    scratch: a `LayerScratch` for layers in their form for few nodes. kv_pool: pool of its window rows; first: scratch
    row of the first node; compression: None for a sliding layer.
    """

    rotation: Rotation
    window_rows_TW: torch.Tensor
    scratch: Scratch | LayerScratch
    kv_pool: str
    first: int
    compression: CompressionRound | None

    @property
    def phase_T(self) -> torch.Tensor | None:
        return None if self.compression is None else self.compression.plan.phase_T

    @property
    def chooses(self) -> bool:
        """Whether an indexer must choose among the entries."""
        return self.compression is not None and self.compression.plan.listed_TK is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Projected:
    """A layer's products of its input x. kv: rotated K = V rows; raw, index_raw: rows of its compressors, if any."""

    x_TD: torch.Tensor
    qr_TD: torch.Tensor
    q_THD: torch.Tensor
    kv_TE: torch.Tensor
    raw_TD: torch.Tensor | None
    index_raw_TD: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """What each node attends to: rows of its window and, in a layer that compresses, of entries."""

    window_RE: torch.Tensor
    window_rows_TW: torch.Tensor
    entries_RE: torch.Tensor | None
    entry_rows_TK: torch.Tensor | None


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
        self.head_dim, self.rope_dim = config.head_dim, config.qk_rope_head_dim
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

    def pools(self, kv_pool: str) -> dict[str, int]:
        """The pools that this layer writes to, each with this layer's index in it."""
        pools = {kv_pool: self.layer}
        for compressor in (self.compressor, None if self.indexer is None else self.indexer.compressor):
            if compressor is not None:
                pools |= dict.fromkeys((compressor.buffer_pool, compressor.entry_pool), self.compressed_layer)
        return pools

    def kv(self, x_TD: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """The rotated K = V row of each node, `[T, head_dim]`."""
        kv_T1D = self.kv_norm(self.wkv(x_TD)).unsqueeze(1)
        return apply_rope(kv_T1D, rotation.cos_NP, rotation.sin_NP).squeeze(1)

    def project(self, x_TD: torch.Tensor, rotation: Rotation, phase_T: torch.Tensor | None) -> Projected:
        """All that is made of a node's input alone. phase_T: place of each node in its compression window."""
        qr_TD = self.q_norm(self.wq_a(x_TD))
        q_THD = rms_norm(self.wq_b(qr_TD).unflatten(-1, (self.num_heads, self.head_dim)), None, self.eps)
        raw_TD, index_raw_TD = None, None
        if phase_T is not None:
            assert self.compressor is not None
            raw_TD = self.compressor.raw(x_TD, phase_T)
            if self.indexer is not None:
                index_raw_TD = self.indexer.compressor.raw(x_TD, phase_T)
        return Projected(
            x_TD=x_TD,
            qr_TD=qr_TD,
            q_THD=apply_rope(q_THD, rotation.cos_NP, rotation.sin_NP),
            kv_TE=self.kv(x_TD, rotation),
            raw_TD=raw_TD,
            index_raw_TD=index_raw_TD,
        )

    def write(self, projected: Projected, here: AttentionRound) -> Listed:
        """Write the nodes' rows, entries that they close included, and list what each attends to."""
        window_RE = here.scratch.write(here.kv_pool, self.layer, projected.kv_TE, here.first)
        entries_RE, rows_TK = None, None
        if here.compression is not None:
            plan, layer = here.compression.plan, self.compressed_layer
            assert self.compressor is not None
            assert projected.raw_TD is not None
            entries_RE = self.compressor.write(projected.raw_TD, here.compression, here.scratch, layer)
            rows_TK = plan.listed_TK
            if self.indexer is not None:
                # Keys are kept even while every entry is chosen anyway: a longer context will score them.
                assert projected.index_raw_TD is not None
                keys_RI = self.indexer.compressor.write(projected.index_raw_TD, here.compression, here.scratch, layer)
                x_TD, qr_TD = projected.x_TD, projected.qr_TD
                if rows_TK is None and isinstance(here.scratch, LayerScratch):
                    rows_TK = self.indexer.few(x_TD, qr_TD, here.rotation, plan.reach, keys_RI)
                elif rows_TK is None:
                    rows_TK = self.indexer(x_TD, qr_TD, here.rotation, plan, keys_RI)
        return Listed(
            window_RE=window_RE,
            window_rows_TW=here.window_rows_TW,
            entries_RE=entries_RE,
            entry_rows_TK=rows_TK,
        )

    def attend(self, q_THD: torch.Tensor, listed: Listed, rotation: Rotation) -> torch.Tensor:
        """Attention's output `[T, D]`."""
        o_THD = self.numerics.attention(
            q_THD,
            listed.window_RE,
            listed.window_rows_TW,
            listed.entries_RE,
            listed.entry_rows_TK,
            self.attn_sink,
            self.rope_dim,
        )
        undo = rotation.inverse
        o_TGD = apply_rope(o_THD, undo.cos_NP, undo.sin_NP).flatten(1).unflatten(-1, (self.groups, -1))
        low_TGR = self.wo_a.grouped(o_TGD)
        return self.group.all_reduce(self.wo_b(low_TGR.flatten(1)))
