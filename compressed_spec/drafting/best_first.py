"""Trees of the most probable nodes under a head's law, found level by level.

B = batch rows, F = nodes of the newest level that are expanded, K = children a node, C = candidates of a row,
V = vocabulary
"""

from collections.abc import Sequence

import numpy as np
import torch

from compressed_spec.drafting.base import DraftRequest, ScoredTree
from compressed_spec.drafting.steps import Steps
from compressed_spec.rows import Ints


def best_first_trees(steps: Steps, request: DraftRequest, *, num_steps: int, width: int) -> list[ScoredTree]:
    """The D - 1 nodes of each row with the best cumulative scores among the candidates, and its root.

    Candidates: at most `num_steps` levels, in each of which the `width` best nodes of the level before have K children.
    With a width of D - 1 no better tree exists, because a node outside the D - 1 best has no descendant among them.
    """
    num_rows = len(request.rows)
    candidate_BF = np.full((num_rows, 1), -1)
    score_BF = torch.zeros((num_rows, 1), dtype=torch.float64)
    token_BF, parent_BF = np.empty((num_rows, 0), dtype=np.int64), np.empty((num_rows, 0), dtype=np.int64)
    tokens: list[Ints] = []
    parents: list[Ints] = []
    scores: list[torch.Tensor] = []
    depths: list[int] = []
    for depth in range(1, min(num_steps, max(request.max_depths)) + 1):
        laws = steps.root() if depth == 1 else steps.descend(token_BF, parent_BF)
        if laws.closed_BF is not None:
            score_BF = score_BF.masked_fill(laws.closed_BF.cpu(), float("-inf"))
        # Under coupled noise the noise has decided already: what matters is who wins under it.
        noise_BV = None if request.noise is None else request.noise(depth)
        num_children = min(request.shape.top_k, laws.log_q_BFV.shape[-1])
        best = request.scoring.best(laws.log_q_BFV, noise_BV, request.temperatures, depth=depth, count=num_children)
        score_BC = (score_BF.unsqueeze(-1) + best.scores_BFK.cpu()).flatten(1)
        token_BC = best.tokens_BFK.cpu().flatten(1).numpy()
        first = len(depths)
        tokens.append(token_BC)
        parents.append(candidate_BF.repeat(num_children, axis=1))
        scores.append(score_BC)
        depths += [depth] * token_BC.shape[1]
        newest_BF = score_BC.topk(min(width, score_BC.shape[1]), dim=-1)
        index_BF = newest_BF.indices.numpy()
        candidate_BF, score_BF = first + index_BF, newest_BF.values
        token_BF, parent_BF = np.take_along_axis(token_BC, index_BF, axis=1), index_BF // num_children
    if not depths:
        return [ScoredTree(tokens=[root], parents=[-1], survival=[1.0]) for root in request.roots]
    all_tokens, all_parents = np.concatenate(tokens, axis=1), np.concatenate(parents, axis=1)
    # Stable: of equal scores the shallower and earlier wins, so ancestors (never worse) are always kept too.
    all_scores = torch.cat(scores, dim=1)
    order = all_scores.sort(dim=-1, descending=True, stable=True)
    trees = []
    for i, (root, max_depth) in enumerate(zip(request.roots, request.max_depths, strict=True)):
        ranked = zip(order.indices[i].tolist(), order.values[i].tolist(), strict=True)
        chosen = [c for c, score in ranked if depths[c] <= max_depth and score > float("-inf")]
        kept = sorted(chosen[: request.shape.num_nodes - 1])
        trees.append(_tree(root, all_tokens[i], all_parents[i], kept, all_scores[i, kept].exp().tolist()))
    return trees


def _tree(root: int, tokens_C: Ints, parents_C: Ints, kept: Sequence[int], survival: Sequence[float]) -> ScoredTree:
    """The tree of the kept candidates, parents first (-1 is the root)."""
    node_of = {-1: 0} | {candidate: node for node, candidate in enumerate(kept, start=1)}
    return ScoredTree(
        tokens=[root, *(tokens_C[c] for c in kept)],
        parents=[-1, *(node_of[int(parents_C[c])] for c in kept)],
        survival=[1.0, *survival],
    )
