"""Trees of a fixed topology: each position takes its parent's child of that rank, whatever the score.

B = batch rows, F = nodes of a level that have children, K = most children
"""

import numpy as np
import torch

from compressed_spec.drafting.base import DraftRequest, ScoredTree
from compressed_spec.drafting.steps import Steps
from compressed_spec.topology import Topology


def ranked_trees(steps: Steps, request: DraftRequest, topology: Topology) -> list[ScoredTree]:
    """One tree a row with exactly the topology's positions, as far as the row's depth cap lets them.

    Raises ValueError if a node has more children than the vocabulary has tokens.
    """
    expanded, depths, ranks = topology.expanded, topology.depths, topology.ranks
    num_rows = len(request.rows)
    token_BN = np.zeros((num_rows, len(topology)), dtype=np.int64)
    token_BN[:, 0] = request.roots
    score_BN = torch.zeros((num_rows, len(topology)), dtype=torch.float64)
    laws = steps.root()
    for depth, nodes in enumerate(expanded[: max(request.max_depths)], start=1):
        vocab_size = laws.log_q_BFV.shape[-1]
        if topology.shape.top_k > vocab_size:
            raise ValueError(
                f"The topology has a node with {topology.shape.top_k} children, more than the vocabulary's "
                f"{vocab_size} tokens: give it fewer."
            )
        noise_BV = None if request.noise is None else request.noise(depth)
        children = [
            child for child, parent in enumerate(topology.parents) if depths[child] == depth and parent in nodes
        ]
        slots = [nodes.index(topology.parents[child]) for child in children]
        child_ranks = [ranks[child] for child in children]
        best = request.scoring.best(
            laws.log_q_BFV, noise_BV, request.temperatures, depth=depth, count=1 + max(child_ranks)
        )
        edge_BFK = best.scores_BFK.cpu()
        if laws.closed_BF is not None:
            edge_BFK = edge_BFK.masked_fill(laws.closed_BF.cpu().unsqueeze(-1), float("-inf"))
        token_BN[:, children] = best.tokens_BFK.cpu().numpy()[:, slots, child_ranks]
        above_BF = score_BN[:, [topology.parents[child] for child in children]]
        score_BN[:, children] = above_BF + edge_BFK[:, slots, child_ranks]
        if depth < min(len(expanded), max(request.max_depths)):
            next_nodes = expanded[depth]
            next_slots = np.asarray([[nodes.index(topology.parents[node]) for node in next_nodes]] * num_rows)
            laws = steps.descend(token_BN[:, next_nodes], next_slots)
    trees = []
    for row, max_depth in enumerate(request.max_depths):
        kept = [node for node, depth in enumerate(depths) if depth <= max_depth and score_BN[row, node] > float("-inf")]
        new = {-1: -1} | {node: place for place, node in enumerate(kept)}
        trees.append(
            ScoredTree(
                tokens=token_BN[row, kept].tolist(),
                parents=[new[topology.parents[node]] for node in kept],
                survival=score_BN[row, kept].exp().tolist(),
            )
        )
    return trees
