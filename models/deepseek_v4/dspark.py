"""The DSpark head: blocks that draft several tokens in one pass, and a Markov head that ties them together.

Its context, K = V rows of every stage, is made of the target's streams; row t lies at RoPE position t. A block holds
the newest token and noise tokens after it, which all see each other.

T = nodes, N = tokens of blocks, M = residual streams, D = model width, V = vocabulary
"""

from collections.abc import Mapping

import torch
from torch import nn

from compressed_spec.models.deepseek_v4.attention import AttentionRound
from compressed_spec.models.deepseek_v4.block import Block
from compressed_spec.models.deepseek_v4.config import DeepseekV4Config
from compressed_spec.models.deepseek_v4.embedding import VocabularyEmbedding
from compressed_spec.models.deepseek_v4.modules import Linear, Norm, Precision
from compressed_spec.models.deepseek_v4.names import DRAFT_LAYER, require_dspark
from compressed_spec.models.deepseek_v4.rope import Rotation
from compressed_spec.parallel import ParallelGroup


class MarkovHead(nn.Module):
    """A low-rank table of what follows each token: logits to add to those of the next place in a block."""

    def __init__(self, vocab_size: int, rank: int, precision: Precision, group: ParallelGroup) -> None:
        super().__init__()
        self.group = group
        self.markov_w1 = VocabularyEmbedding(vocab_size, rank, precision.dtype, group)
        self.markov_w2 = Linear(rank, group.part(vocab_size), precision)

    def forward(self, tokens_N: torch.Tensor) -> torch.Tensor:
        return self.group.all_gather(self.markov_w2(self.markov_w1(tokens_N)))


class ConfidenceHead(nn.Module):
    """How likely the draft at each place is to be accepted, given the token before it."""

    def __init__(self, in_features: int, precision: Precision) -> None:
        super().__init__()
        self.proj = Linear(in_features, 1, precision, wide=True)

    def forward(self, x_ND: torch.Tensor, previous_NR: torch.Tensor) -> torch.Tensor:
        both = torch.cat((x_ND, previous_NR), dim=-1).to(self.proj.weight.dtype)
        score_N1: torch.Tensor = self.proj(both)
        return score_N1.squeeze(-1)


class DSparkStage(Block):
    """`mtp.N`: a sliding-window, score-routed block. The first has what reads the target, the last what drafts."""

    main_proj: Linear
    main_norm: Norm
    norm: Norm
    markov_head: MarkovHead
    confidence_head: ConfidenceHead

    def __init__(
        self,
        config: DeepseekV4Config,
        stage: int,
        *,
        first: bool,
        last: bool,
        precision: Precision,
        group: ParallelGroup,
    ) -> None:
        super().__init__(config, DRAFT_LAYER, stage, 0, precision, group)
        dspark, width, eps = require_dspark(config), config.hidden_size, config.rms_norm_eps
        if first:
            self.main_proj = Linear(width * len(dspark.target_layer_ids), width, precision)
            self.main_norm = Norm(width, eps, precision)
        if last:
            self.norm = Norm(width, eps, precision)
            self.add_site("head")
            self.markov_head = MarkovHead(config.vocab_size, dspark.markov_rank, precision, group)
            self.confidence_head = ConfidenceHead(width + dspark.markov_rank, precision)


class DSparkHead(nn.ModuleList):
    """`mtp`: all stages, in order. Raises ValueError if the config lacks the dspark_* keys."""

    def __init__(self, config: DeepseekV4Config, num_stages: int, precision: Precision, group: ParallelGroup) -> None:
        super().__init__(
            DSparkStage(config, i, first=i == 0, last=i == num_stages - 1, precision=precision, group=group)
            for i in range(num_stages)
        )
        self.settings = require_dspark(config)

    @property
    def stages(self) -> list[DSparkStage]:
        return [stage for stage in self if isinstance(stage, DSparkStage)]

    def kv_rows(self, streams_of: Mapping[int, torch.Tensor], rotation: Rotation) -> list[torch.Tensor]:
        """Every stage's K = V rows `[T, head_dim]` of target tokens.

        streams_of: the target's streams `[T, M, D]` after each layer of `target_layer_ids`.
        """
        stages = self.stages
        main_hidden = [streams_of[layer].mean(dim=1) for layer in self.settings.target_layer_ids]
        main_TD = stages[0].main_norm(stages[0].main_proj(torch.cat(main_hidden, dim=-1)))
        return [stage.attn.kv(main_TD, rotation) for stage in stages]

    def hidden(self, embedded_ND: torch.Tensor, tokens_N: torch.Tensor, here: AttentionRound) -> torch.Tensor:
        """The stages' one output stream `[N, D]` at each place of the blocks; writes their rows to scratch."""
        stages = self.stages
        streams_NMD = embedded_ND.unsqueeze(1).expand(-1, stages[0].config.hc_mult, -1)
        for stage in stages:
            streams_NMD = stage(streams_NMD, tokens_N, here)
        return stages[-1].collapse_head(streams_NMD)

    def confidence(self, hidden_ND: torch.Tensor, tokens_N: torch.Tensor) -> torch.Tensor:
        """Scores `[N]`, before the sigmoid, of the drafts at places that follow these tokens."""
        last = self.stages[-1]
        score_N: torch.Tensor = last.confidence_head(hidden_ND, last.markov_head.markov_w1(tokens_N))
        return score_N
