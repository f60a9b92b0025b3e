"""A model that looks at one token only: its acceptance is known in closed form, and it runs in microseconds.

T = nodes, V = vocabulary, M = residual streams (1), D = model width (V), N = draft nodes
"""

from collections.abc import Sequence

import torch

from compressed_spec.cache import Scratch
from compressed_spec.layout import StateSpec
from compressed_spec.rows import RowPlan
from compressed_spec.target import DraftStep, StepDraft, TargetModel


class MarkovModel(TargetModel):
    """The next token's logits are a row of `logits_VV`, the draft head's a row of `head_VV`; both by the token before.

    A head with the target's own table is an oracle that drafts through the package's own drafter.
    """

    def __init__(self, logits_VV: torch.Tensor, head_VV: torch.Tensor) -> None:
        super().__init__()
        self.vocab_size, self.max_position_embeddings = len(logits_VV), 4096
        self.eos_token_ids: tuple[int, ...] = ()
        self._logits_VV, self._head_VV = logits_VV.double(), head_VV.double()

    def state_spec(self) -> StateSpec:
        return StateSpec(
            sliding_window=1,
            num_layers=1,
            head_dim=1,
            compressions=(),
            head_layers=1,
            head_shift=-1,
            num_streams=1,
            model_dim=self.vocab_size,
            dtype=torch.float64,
            buffer_dtype=torch.float64,
        )

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def own_drafter(self) -> str | None:
        return "mtp"

    def forward(self, plan: RowPlan, scratch: Scratch) -> torch.Tensor:
        streams_TMD = self._one_hot(plan.tokens_T)
        scratch.write("pending_stream", 0, streams_TMD.flatten(1))
        return streams_TMD

    def logits(self, streams_TMD: torch.Tensor) -> torch.Tensor:
        return streams_TMD[:, 0] @ self._logits_VV

    def draft_step(self, step: DraftStep, scratch: Scratch) -> StepDraft:
        return StepDraft(streams_NMD=self._one_hot(step.tokens_N), logits_NV=self._head_VV[step.tokens_N])

    def _one_hot(self, tokens_T: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(tokens_T, self.vocab_size).double().unsqueeze(1)


def cycle(vocab_size: int, sure: float = 50.0, seed: int = 0) -> torch.Tensor:
    """A table `[V, V]` in which each token's successor stands out by `sure`, above noise of size 1."""
    noise_VV = torch.randn((vocab_size, vocab_size), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return noise_VV + sure * torch.eye(vocab_size, dtype=torch.float64).roll(1, dims=1)


def mixed_table(right_VV: torch.Tensor, wrong: Sequence[int]) -> torch.Tensor:
    """A table whose best and second best token are exchanged in the rows of these tokens."""
    mixed_VV = right_VV.clone()
    for token in wrong:
        first, second = right_VV[token].topk(2).indices.tolist()
        mixed_VV[token, [first, second]] = right_VV[token, [second, first]]
    return mixed_VV
