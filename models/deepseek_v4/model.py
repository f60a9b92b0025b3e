"""DeepSeek-V4 over flat nodes and row lists.

T = nodes, V = vocabulary, M = residual streams, D = model width, N = draft nodes
"""

from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn

from compressed_spec.cache import Scratch
from compressed_spec.layout import Compression, StateSpec
from compressed_spec.models.deepseek_v4.attention import AttentionRound, CompressionRound, compression_of
from compressed_spec.models.deepseek_v4.block import Block
from compressed_spec.models.deepseek_v4.config import DeepseekV4Config
from compressed_spec.models.deepseek_v4.modules import HyperConnected, Norm, Precision
from compressed_spec.models.deepseek_v4.mtp import MTPHead
from compressed_spec.models.deepseek_v4.rope import rope_frequencies, rotation
from compressed_spec.models.deepseek_v4.state import state_spec
from compressed_spec.rows import RowPlan
from compressed_spec.target import DraftStep, TargetModel


class DeepseekV4(TargetModel, HyperConnected):
    """The whole model; parameters carry the upstream names, with the experts of a layer stacked.

    with_mtp: whether it has the MTP head (`mtp.0`). dtype: of matrices, activations and KV.
    """

    def __init__(self, config: DeepseekV4Config, *, with_mtp: bool, dtype: torch.dtype) -> None:
        super().__init__(config, Precision(dtype=dtype))
        self.vocab_size, self.max_position_embeddings = config.vocab_size, config.max_position_embeddings
        self.eos_token_ids = config.eos_token_ids
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        seen: Counter[Compression | None] = Counter()
        layers = []
        for index, spec in enumerate(config.layers):
            kind = compression_of(config, spec)
            layers.append(Block(config, spec, index, seen[kind], self.precision))
            seen[kind] += 1
        self.layers = nn.ModuleList(layers)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps, self.precision)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
        self.add_site("head")
        self.mtp = nn.ModuleList([MTPHead(config, self.precision)] if with_mtp else [])
        for name, compress in (("main", False), ("compress", True)):
            frequencies = rope_frequencies(config, compress=compress, dtype=self.precision.wide)
            self.register_buffer(f"rope_{name}", frequencies, persistent=False)

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    @property
    def draft_head(self) -> MTPHead | None:
        head = self.mtp[0] if len(self.mtp) else None
        assert head is None or isinstance(head, MTPHead)
        return head

    @property
    def has_draft_head(self) -> bool:
        return len(self.mtp) > 0

    def state_spec(self) -> StateSpec:
        return state_spec(self.config, with_mtp=self.has_draft_head, precision=self.precision)

    def forward(self, plan: RowPlan, scratch: Scratch) -> torch.Tensor:
        main = rotation(self.get_buffer("rope_main"), plan.position_T)
        compress_frequencies = self.get_buffer("rope_compress")
        compress = rotation(compress_frequencies, plan.position_T)
        rounds = {
            name: CompressionRound(plan=comp, entries=rotation(compress_frequencies, comp.entry_position_C))
            for name, comp in plan.compressions.items()
        }
        embedded_TD = self.embed(plan.tokens_T)
        streams_TMD: torch.Tensor = embedded_TD.unsqueeze(1).expand(-1, self.config.hc_mult, -1)
        for block, spec in zip(self.layers, self.config.layers, strict=True):
            kind = compression_of(self.config, spec)
            here = AttentionRound(
                rotation=main if kind is None else compress,
                window_rows_TW=plan.window_rows_TW,
                scratch=scratch,
                kv_pool="window_kv",
                first=0,
                compression=None if kind is None else rounds[kind.name],
            )
            streams_TMD = block(streams_TMD, plan.tokens_T, here)
        head = self.draft_head
        if head is not None:
            rows_RD = scratch.write("pending_stream", 0, streams_TMD.flatten(1))
            previous_TMD = rows_RD[plan.parent_stream_T].unflatten(-1, (self.config.hc_mult, -1))
            before = rotation(self.get_buffer("rope_main"), plan.position_T - 1)
            scratch.write("head_kv", 0, head.kv_rows(previous_TMD, embedded_TD, before))
        return streams_TMD

    def logits(self, streams_TMD: torch.Tensor) -> torch.Tensor:
        return self._project(self.norm(self.collapse_head(streams_TMD)))

    def _project(self, x_TD: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TD, self.head.weight).to(self.precision.wide)

    def draft_step(self, step: DraftStep, scratch: Scratch) -> torch.Tensor:
        head = self.draft_head
        assert head is not None, "this model has no draft head"
        here = AttentionRound(
            rotation=rotation(self.get_buffer("rope_main"), step.position_N),
            window_rows_TW=step.window_rows_NW,
            scratch=scratch,
            kv_pool="head_kv",
            first=step.first,
            compression=None,
        )
        return head.step(step.streams_NMD, self.embed(step.tokens_N), step.tokens_N, here)

    def draft_logits(self, streams_NMD: torch.Tensor) -> torch.Tensor:
        head = self.draft_head
        assert head is not None, "this model has no draft head"
        return self._project(head.norm(head.collapse_head(streams_NMD)))
