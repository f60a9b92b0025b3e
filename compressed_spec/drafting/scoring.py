"""What a draft head's law says about acceptance: the score of a child, which decides who is expanded and verified.

A score is the log of an estimate: how likely is this token the target's, once the target's text has reached its
parent? The law itself is a poor estimate (a head is less sure than it should be, the more so the deeper), so scores
have a temperature, and a correction by depth and rank, both of which can be fitted to what the target accepted.

B = batch rows, F = nodes of a level, V = vocabulary, K = best children
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compressed_spec.noise import coupled_scores


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """A level's best children: `scores_BFK` (log, float64, never above 0, best first) and `tokens_BFK`."""

    scores_BFK: torch.Tensor
    tokens_BFK: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """log softmax of log q / t, or of (log q + g) / t under coupled noise g, plus a correction by depth and rank.

    greedy_temperature, sampled_temperature: t for rows at temperature 0, and above it. log_bias: one row a depth (1:
    the root's children), one entry a rank; beyond its end the last row, or entry, holds.
    """

    greedy_temperature: float = 1.0
    sampled_temperature: float = 1.0
    log_bias: tuple[tuple[float, ...], ...] = ()

    def edges(
        self, log_q_BFV: torch.Tensor, noise_BV: torch.Tensor | None, temperatures: Sequence[float]
    ) -> torch.Tensor:
        """Scores of all children `[B, F, V]`, not yet corrected. temperatures: of the rows' target laws."""
        scales = [self.sampled_temperature if t else self.greedy_temperature for t in temperatures]
        if noise_BV is None and set(scales) == {1.0}:
            return log_q_BFV
        scale_B11 = torch.tensor(scales, dtype=torch.float64, device=log_q_BFV.device).view(-1, 1, 1)
        if noise_BV is None:
            return torch.log_softmax(log_q_BFV / scale_B11, dim=-1)
        return coupled_scores(log_q_BFV / scale_B11, noise_BV.unsqueeze(1) / scale_B11)

    def best(
        self,
        log_q_BFV: torch.Tensor,
        noise_BV: torch.Tensor | None,
        temperatures: Sequence[float],
        *,
        depth: int,
        count: int,
    ) -> Best:
        """The `count` best children of each node of a level; they lie at `depth`."""
        best = self.edges(log_q_BFV, noise_BV, temperatures).topk(count, dim=-1)
        scores_BFK = best.values
        if self.log_bias:
            bias_K = torch.tensor([self.bias(depth, rank) for rank in range(count)], dtype=torch.float64)
            # A better rank never scores below a worse one, so that what is kept are always the first ranks.
            scores_BFK = (scores_BFK + bias_K.to(scores_BFK.device)).clamp_(max=0).cummin(dim=-1).values
        return Best(scores_BFK=scores_BFK, tokens_BFK=best.indices)

    def bias(self, depth: int, rank: int) -> float:
        """The correction of the child of this rank (from 0) at this depth (from 1)."""
        if not self.log_bias:
            return 0.0
        row = self.log_bias[min(depth, len(self.log_bias)) - 1]
        return row[min(rank, len(row) - 1)] if row else 0.0

    def corrected(self, score: float, *, depth: int, rank: int) -> float:
        """One child's log score with its correction, for drafters without tensors."""
        return min(0.0, score + self.bias(depth, rank))
