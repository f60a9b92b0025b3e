"""The checkpoint's multi-token-prediction head as a drafter: step 1 gives the root's children, later steps go on."""

from collections.abc import Sequence

import torch

from compressed_spec.drafting.base import DraftRequest, ScoredTree, StatelessDrafter
from compressed_spec.drafting.best_first import best_first_trees
from compressed_spec.drafting.head import HeadSteps
from compressed_spec.drafting.ranked import ranked_trees
from compressed_spec.drafting.sampled import sampled_trees
from compressed_spec.drafting.steps import require_head
from compressed_spec.target import TargetModel
from compressed_spec.verifying import Coins, DraftTree


class MTPDrafter(StatelessDrafter):
    """Drafts with `mtp.0`. Its rows for committed tokens come from verification, so it keeps no state of its own.

    Raises ValueError if the model has no such head.
    """

    def __init__(self, model: TargetModel) -> None:
        require_head(model, "mtp")
        self._model = model

    @torch.no_grad()
    def propose_sampled(self, request: DraftRequest, coins: Sequence[Coins]) -> list[DraftTree]:
        """Trees drawn from the head's law, in the topology asked for, or fixed by the shape alone."""
        return sampled_trees(HeadSteps(self._model, request), request, coins, num_steps=request.shape.num_steps)

    @torch.no_grad()
    def propose(self, request: DraftRequest) -> list[ScoredTree]:
        """Best-first in levels: the K best nodes of the newest level get K children each; the D - 1 best are kept.

        With a topology instead: its positions, by rank.
        """
        steps, shape = HeadSteps(self._model, request), request.shape
        if request.topology is not None:
            return ranked_trees(steps, request, request.topology)
        return best_first_trees(steps, request, num_steps=shape.num_steps, width=shape.top_k)
