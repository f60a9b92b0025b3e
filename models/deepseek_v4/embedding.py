"""An embedding whose vocabulary is dealt out to several processes.

T = nodes, D = width
"""

import torch
from torch import nn

from compressed_spec.parallel import ParallelGroup


class VocabularyEmbedding(nn.Embedding):
    """This process's rows of an embedding; looked up together with the others'."""

    def __init__(self, vocab_size: int, width: int, dtype: torch.dtype, group: ParallelGroup) -> None:
        super().__init__(group.part(vocab_size), width, dtype=dtype)
        self.group, self.own = group, group.span(vocab_size)

    def forward(self, tokens_T: torch.Tensor) -> torch.Tensor:
        if self.group.size == 1:
            return super().forward(tokens_T)
        elsewhere_T = (tokens_T < self.own.start) | (tokens_T >= self.own.stop)
        rows_TD = super().forward((tokens_T - self.own.start).masked_fill(elsewhere_T, 0))
        return self.group.all_reduce(rows_TD.masked_fill(elsewhere_T.unsqueeze(-1), 0.0))
