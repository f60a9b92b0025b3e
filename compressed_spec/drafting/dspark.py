"""The checkpoint's DSpark head as a drafter: one pass drafts a block of places, a Markov head ties them to each other.

B = batch rows, S = places of a block, N = B S places, F = nodes of a level, V = vocabulary, W = slots of a ring
"""

from collections.abc import Sequence

import numpy as np
import torch

from compressed_spec.cache import Scratch
from compressed_spec.drafting.base import DraftRequest, ScoredTree, StatelessDrafter
from compressed_spec.drafting.best_first import best_first_trees
from compressed_spec.drafting.ranked import ranked_trees
from compressed_spec.drafting.sampled import sampled_trees
from compressed_spec.drafting.steps import Laws, law_at, require_head
from compressed_spec.rows import Ints
from compressed_spec.target import BlockDraft, DraftBlock, TargetModel
from compressed_spec.verifying import Coins, DraftTree


def block_rows(request: DraftRequest, block_size: int) -> Ints:
    """Rows that each place reads `[N, W + S]`: what its row's ring holds, and all places of its own block."""
    cache = request.cache
    rows_B1 = np.asarray(request.rows, dtype=np.int64)[:, None]
    length_B1 = np.asarray([cache.lengths[row] for row in request.rows], dtype=np.int64)[:, None]
    slot_W = np.arange(cache.spec.sliding_window)
    ring_BW = np.where(slot_W < length_B1, rows_B1 * cache.spec.sliding_window + slot_W, -1)
    own_BS = cache.num_persistent("head_kv") + np.arange(len(request.rows) * block_size).reshape(-1, block_size)
    return np.concatenate((ring_BW, own_BS), axis=1).repeat(block_size, axis=0)


class BlockSteps:
    """The blocks of one round, before its verification: whatever was verified earlier can no longer be committed.

    The place at depth d drafts the children of the nodes at depth d. confidence_threshold: nodes after which the head
    thinks a draft less likely to be accepted than this are closed.
    Raises ValueError if the cache has too few draft nodes for the blocks.
    """

    def __init__(self, model: TargetModel, request: DraftRequest, confidence_threshold: float) -> None:
        most = len(request.rows) * model.draft_block_size
        if most > request.cache.shape.max_draft_nodes:
            raise ValueError(
                f"Drafting blocks of {model.draft_block_size} for {len(request.rows)} rows needs {most} draft nodes, "
                f"more than the cache's {request.cache.shape.max_draft_nodes}: make it with a larger max_draft_nodes."
            )
        self._model, self._request, self._threshold = model, request, confidence_threshold
        self._depth = 0
        self._draft: BlockDraft | None = None

    def root(self) -> Laws:
        """Run the head; its KV rows go to scratch."""
        cache, device, size = self._request.cache, self._request.cache.device, self._model.draft_block_size
        cache.next_ticket()  # the scratch rows of the blocks are a verification's too: one of them must give way
        length_B1 = np.asarray([cache.lengths[row] for row in self._request.rows], dtype=np.int64)[:, None]
        block = DraftBlock(
            roots_B=torch.tensor(self._request.roots, device=device),
            position_N=torch.from_numpy((length_B1 + np.arange(size)).ravel()).to(device),
            rows_NW=torch.from_numpy(block_rows(self._request, size)).to(device),
        )
        self._depth, self._draft = 0, self._model.draft_block(block, Scratch(cache))
        return self._laws(block.roots_B.unsqueeze(1))

    def descend(self, tokens_BF: Ints, parent_BF: Ints) -> Laws:
        """Laws of nodes one deeper. All that a place knows of its node's path is the node's own token."""
        self._depth += 1
        return self._laws(torch.from_numpy(tokens_BF).to(self._request.cache.device))

    def _laws(self, tokens_BF: torch.Tensor) -> Laws:
        assert self._draft is not None, "the roots come first"
        num_rows, width = tokens_BF.shape
        bias_BFV = self._model.draft_bias(tokens_BF.flatten()).unflatten(0, (num_rows, width))
        log_q_BFV = law_at(self._draft.logits_BSV[:, self._depth, None] + bias_BFV, self._request.temperatures)
        closed_BF = None
        if self._threshold > 0:
            hidden_BFD = self._draft.hidden_BSD[:, self._depth, None].expand(-1, width, -1)
            log_odds_N = self._model.draft_confidence(hidden_BFD.flatten(0, 1), tokens_BF.flatten())
            closed_BF = log_odds_N.sigmoid().unflatten(0, (num_rows, width)) < self._threshold
        return Laws(log_q_BFV=log_q_BFV, closed_BF=closed_BF)


class DSparkDrafter(StatelessDrafter):
    """Drafts with `mtp.0 ..`. Its rows for committed tokens come from verification, so it keeps no state of its own.

    The block is as long as the checkpoint's, whatever the tree, which reaches no deeper. confidence_threshold: in
    [0, 1); children are left out where the head thinks them less likely to be accepted than this (sampled trees, whose
    topology is fixed beforehand, are not cut).
    Raises ValueError if the model has no such head, or for a threshold out of range.
    """

    def __init__(self, model: TargetModel, *, confidence_threshold: float = 0.0) -> None:
        require_head(model, "dspark")
        if not 0 <= confidence_threshold < 1:
            raise ValueError(f"confidence_threshold is a probability below 1, got {confidence_threshold}.")
        self._model, self.confidence_threshold = model, confidence_threshold

    @torch.no_grad()
    def propose_sampled(self, request: DraftRequest, coins: Sequence[Coins]) -> list[DraftTree]:
        """Trees drawn from the head's law, in the topology asked for, or fixed by the shape alone."""
        return sampled_trees(BlockSteps(self._model, request, 0.0), request, coins, num_steps=self._num_steps(request))

    @torch.no_grad()
    def propose(self, request: DraftRequest) -> list[ScoredTree]:
        """The D - 1 best nodes, of at most N levels and K children a node, by the product of their probabilities.

        With a topology instead: its positions, by rank, as deep as the block is long.
        """
        steps, num_steps = BlockSteps(self._model, request, self.confidence_threshold), self._num_steps(request)
        if request.topology is not None:
            return ranked_trees(steps, request, request.topology.limited(num_steps))
        return best_first_trees(steps, request, num_steps=num_steps, width=request.shape.num_nodes - 1)

    def _num_steps(self, request: DraftRequest) -> int:
        return min(request.shape.num_steps, self._model.draft_block_size)
