"""The multi-token-prediction head: a block of its own over (target's stream, next token) pairs.

Row t of its KV stands for the stream after token t and the token t + 1; it lies at RoPE position t.

T = nodes, M = residual streams, D = model width
"""

import torch

from compressed_spec.kernels.hyper_connection import collapse
from compressed_spec.models.deepseek_v4.attention import AttentionRound
from compressed_spec.models.deepseek_v4.block import Block
from compressed_spec.models.deepseek_v4.config import DeepseekV4Config
from compressed_spec.models.deepseek_v4.modules import Linear, Norm, Precision
from compressed_spec.models.deepseek_v4.names import DRAFT_LAYER
from compressed_spec.models.deepseek_v4.rope import Rotation
from compressed_spec.parallel import ParallelGroup


class MTPHead(Block):
    """`mtp.0`: a sliding-window, score-routed block with its input projections and its own output collapse and norm."""

    def __init__(self, config: DeepseekV4Config, precision: Precision, group: ParallelGroup) -> None:
        super().__init__(config, DRAFT_LAYER, 0, 0, precision, group)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.e_proj = Linear(width, width, precision)
        self.h_proj = Linear(width, width, precision)
        self.enorm = Norm(width, eps, precision)
        self.hnorm = Norm(width, eps, precision)
        self.norm = Norm(width, eps, precision)
        self.add_site("head")

    def fuse(self, streams_TMD: torch.Tensor, embedded_TD: torch.Tensor) -> torch.Tensor:
        """The head's input streams: the previous stream's projection, plus the next token's on every copy."""
        stream_TMD: torch.Tensor = self.h_proj(self.hnorm(streams_TMD))
        token_TD: torch.Tensor = self.e_proj(self.enorm(embedded_TD))
        return stream_TMD + token_TD.unsqueeze(1)

    def kv_rows(self, streams_TMD: torch.Tensor, embedded_TD: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Only the K = V rows `[T, head_dim]`: what verification leaves behind, so that drafting needs no catch-up."""
        fused_TMD = self.fuse(streams_TMD, embedded_TD)
        x_TD = self.attn_norm(collapse(fused_TMD, self.mix("attn", fused_TMD).pre_TM))
        return self.attn.kv(x_TD, rotation)

    def step(
        self, streams_TMD: torch.Tensor, embedded_TD: torch.Tensor, tokens_T: torch.Tensor, here: AttentionRound
    ) -> torch.Tensor:
        """The head's own streams after a full step `[T, M, D]`; writes its KV rows to scratch."""
        output: torch.Tensor = self(self.fuse(streams_TMD, embedded_TD), tokens_T, here)
        return output
