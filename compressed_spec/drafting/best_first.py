"""Trees of the most probable nodes under a head's law, found level by level.

B = batch rows, F = nodes of the newest level that are expanded, K = children a node, C = candidates of a row,
V = vocabulary
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from compressed_spec.drafting.base import DraftRequest, ScoredTree
from compressed_spec.drafting.steps import Steps
from compressed_spec.rows import Ints

Floats = NDArray[np.float64]


def best_first_trees(steps: Steps, request: DraftRequest, *, num_steps: int, width: int) -> list[ScoredTree]:
    """The D - 1 nodes of each row with the best cumulative scores among the candidates, and its root.

    Candidates: at most `num_steps` levels, in each of which the `width` best nodes of the level before have K children.
    With a width of D - 1 no better tree exists, because a node outside the D - 1 best has no descendant among them.
    """
    num_rows = len(request.rows)
    candidate_BF, score_BF = np.full((num_rows, 1), -1), np.zeros((num_rows, 1))
    token_BF = parent_BF = np.empty((num_rows, 0), dtype=np.int64)
    tokens: list[Ints] = []
    parents: list[Ints] = []
    scores: list[Floats] = []
    depths: list[int] = []
    row_B1 = np.arange(num_rows)[:, None]
    for depth in range(1, min(num_steps, max(request.max_depths)) + 1):
        laws = steps.root() if depth == 1 else steps.descend(token_BF, parent_BF)
        if laws.closed_BF is not None:
            score_BF = np.where(laws.closed_BF.cpu().numpy(), -np.inf, score_BF)
        # Under coupled noise the noise has decided already: what matters is who wins under it.
        noise_BV = None if request.noise is None else request.noise(depth)
        num_children = min(request.shape.top_k, laws.log_q_BFV.shape[-1])
        best = request.scoring.best(laws.log_q_BFV, noise_BV, request.temperatures, depth=depth, count=num_children)
        score_BC = (score_BF[:, :, None] + best.scores_BFK.cpu().numpy()).reshape(num_rows, -1)
        token_BC = best.tokens_BFK.cpu().numpy().reshape(num_rows, -1)
        first = len(depths)
        tokens.append(token_BC)
        parents.append(candidate_BF.repeat(num_children, axis=1))
        scores.append(score_BC)
        depths += [depth] * token_BC.shape[1]
        index_BF = _best_columns(score_BC)[:, :width]
        candidate_BF, score_BF = first + index_BF, score_BC[row_B1, index_BF]
        token_BF, parent_BF = token_BC[row_B1, index_BF], index_BF // num_children
    if not depths:
        return [ScoredTree(tokens=[root], parents=[-1], survival=[1.0]) for root in request.roots]
    all_tokens, all_parents = np.concatenate(tokens, axis=1), np.concatenate(parents, axis=1)
    all_scores = np.concatenate(scores, axis=1)
    ranked = _best_columns(all_scores)
    trees = []
    for i, (root, max_depth) in enumerate(zip(request.roots, request.max_depths, strict=True)):
        scores_C = all_scores[i].tolist()
        chosen = [c for c in ranked[i].tolist() if depths[c] <= max_depth and scores_C[c] > -math.inf]
        kept = sorted(chosen[: request.shape.num_nodes - 1])
        survival = [math.exp(scores_C[c]) for c in kept]
        trees.append(_tree(root, all_tokens[i].tolist(), all_parents[i].tolist(), kept, survival))
    return trees


def _best_columns(score_BC: Floats) -> Ints:
    """Each row's columns, best first. Of equal scores the earlier one wins.

    Candidates come level by level, so ancestors, which never score worse, come before their descendants.
    """
    return np.argsort(-score_BC, axis=1, kind="stable")


def _tree(
    root: int, tokens_C: Sequence[int], parents_C: Sequence[int], kept: Sequence[int], survival: Sequence[float]
) -> ScoredTree:
    """The tree of the kept candidates, parents first (-1 is the root)."""
    node_of = {-1: 0} | {candidate: node for node, candidate in enumerate(kept, start=1)}
    return ScoredTree(
        tokens=[root, *(tokens_C[c] for c in kept)],
        parents=[-1, *(node_of[parents_C[c]] for c in kept)],
        survival=[1.0, *survival],
    )
