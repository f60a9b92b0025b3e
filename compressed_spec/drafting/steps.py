"""What the trees of a draft head are grown from: its law after each node, one level of the tree at a time.

B = batch rows, F = nodes of a level, N = nodes, V = vocabulary
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from compressed_spec.rows import Ints
from compressed_spec.target import TargetModel

_HEADS = {"mtp": "MTP", "dspark": "DSpark"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Laws:
    """log_q_BFV: float64, the head's log law after each node of a level. closed_BF: nodes that shall have no children.

    None where every node may have some.
    """

    log_q_BFV: torch.Tensor
    closed_BF: torch.Tensor | None = None


class Steps(Protocol):
    """A head in one round. The levels are asked for in order, as many nodes a row in each."""

    def root(self) -> Laws:
        """The roots' laws, `[B, 1, V]`."""
        ...

    def descend(self, tokens_BF: Ints, parent_BF: Ints) -> Laws:
        """The next level's: these tokens, each after the node of the level before that `parent_BF` names in its row."""
        ...


def law_at(logits_BFV: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    """Log law, float64, at each row's temperature; greedy rows are ranked at temperature 1."""
    scales = [t or 1.0 for t in temperatures]
    if set(scales) != {1.0}:
        scale_B = torch.tensor(scales, dtype=torch.float64, device=logits_BFV.device)
        logits_BFV = logits_BFV.double() / scale_B.view(-1, 1, 1)
    return torch.log_softmax(logits_BFV, dim=-1, dtype=torch.float64)


def require_head(model: TargetModel, drafter: str) -> None:
    """Raise ValueError unless the model's own head is the one that this drafter needs ("mtp" or "dspark")."""
    if model.own_drafter != drafter:
        raise ValueError(
            f"The checkpoint has no {_HEADS[drafter]} head: use drafter={model.own_drafter or 'ngram'!r}, or 'auto' to "
            "choose what is there."
        )
