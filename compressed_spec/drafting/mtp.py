"""The checkpoint's multi-token-prediction head as a drafter: step 1 gives the root's children, later steps go deeper.

B = batch rows, F = nodes of the newest level that are expanded, K = children a node, C = candidates of a row
"""

from collections.abc import Sequence

import numpy as np
import torch

from compressed_spec.drafting.base import DraftRequest
from compressed_spec.drafting.head import HeadSteps
from compressed_spec.drafting.sampled import sampled_trees
from compressed_spec.noise import coupled_scores
from compressed_spec.rows import Ints
from compressed_spec.target import TargetModel
from compressed_spec.tree import TokenTree
from compressed_spec.verifying import Coins, DraftTree


class MTPDrafter:
    """Drafts with `mtp.0`. Its rows for committed tokens come from verification, so it keeps no state of its own.

    Raises ValueError if the model has no such head.
    """

    def __init__(self, model: TargetModel) -> None:
        if not model.has_draft_head:
            raise ValueError("The checkpoint has no MTP head: use drafter='ngram', or 'auto' to choose what is there.")
        self._model = model

    def start(self, row: int, token_ids: Sequence[int]) -> None:
        pass

    def observe(self, row: int, token_ids: Sequence[int]) -> None:
        pass

    def release(self, row: int) -> None:
        pass

    @torch.no_grad()
    def propose_sampled(self, request: DraftRequest, coins: Sequence[Coins]) -> list[DraftTree]:
        """Trees drawn from the head's law, in a topology fixed by the shape alone."""
        return sampled_trees(self._model, request, coins)

    @torch.no_grad()
    def propose(self, request: DraftRequest) -> list[TokenTree]:
        """Best-first in levels: the K best nodes of the newest level get K children each; the D - 1 best are kept."""
        num_rows, num_children = len(request.rows), min(request.shape.top_k, self._model.vocab_size)
        steps = HeadSteps(self._model, request, num_rows * request.shape.num_draft_nodes)
        level = steps.root()
        candidate_BF = np.full((num_rows, 1), -1)
        score_BF = torch.zeros((num_rows, 1), dtype=torch.float64)
        tokens: list[Ints] = []
        parents: list[Ints] = []
        scores: list[torch.Tensor] = []
        depths: list[int] = []
        for depth in range(1, min(request.shape.num_steps, max(request.max_depths)) + 1):
            processed = steps.process(level)
            # Under coupled noise the noise has decided already: what matters is who wins under it.
            score_BFV = processed.log_q_BFV
            if request.noise is not None:
                score_BFV = coupled_scores(score_BFV, request.noise(depth).unsqueeze(1))
            best_BFK = score_BFV.topk(num_children, dim=-1)
            score_BC = (score_BF.unsqueeze(-1) + best_BFK.values.cpu()).flatten(1)
            token_BC = best_BFK.indices.cpu().flatten(1).numpy()
            first = len(depths)
            tokens.append(token_BC)
            parents.append(candidate_BF.repeat(num_children, axis=1))
            scores.append(score_BC)
            depths += [depth] * token_BC.shape[1]
            newest_BF = score_BC.topk(min(num_children, score_BC.shape[1]), dim=-1)
            index_BF = newest_BF.indices.numpy()
            candidate_BF, score_BF = first + index_BF, newest_BF.values
            level = level.children(processed, np.take_along_axis(token_BC, index_BF, axis=1), index_BF // num_children)
        if not depths:
            return [TokenTree(tokens=[root], parents=[-1]) for root in request.roots]
        all_tokens, all_parents = np.concatenate(tokens, axis=1), np.concatenate(parents, axis=1)
        # Stable: of equal scores the shallower and earlier wins, so ancestors (never worse) are always kept too.
        order = torch.cat(scores, dim=1).sort(dim=-1, descending=True, stable=True)
        trees = []
        for i, (root, max_depth) in enumerate(zip(request.roots, request.max_depths, strict=True)):
            ranked = zip(order.indices[i].tolist(), order.values[i].tolist(), strict=True)
            best = [c for c, score in ranked if depths[c] <= max_depth and score > float("-inf")]
            trees.append(_tree(root, all_tokens[i], all_parents[i], sorted(best[: request.shape.num_nodes - 1])))
        return trees


def _tree(root: int, tokens_C: Ints, parents_C: Ints, kept: Sequence[int]) -> TokenTree:
    """The tree of the kept candidates, parents first (-1 is the root)."""
    node_of = {-1: 0} | {candidate: node for node, candidate in enumerate(kept, start=1)}
    return TokenTree(
        tokens=[root, *(tokens_C[c] for c in kept)],
        parents=[-1, *(node_of[int(parents_C[c])] for c in kept)],
    )
