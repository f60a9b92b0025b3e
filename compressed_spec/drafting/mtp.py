"""The checkpoint's multi-token-prediction head as a drafter: step 1 gives the root's children, later steps go deeper.

B = batch rows, F = nodes of the newest level that are expanded, K = children a node, N = B F nodes of one head step,
V = vocabulary, M = residual streams, D = model width, A = levels so far
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from compressed_spec.cache import Scratch
from compressed_spec.drafting.base import DraftRequest
from compressed_spec.rows import Ints, Nodes, window_rows
from compressed_spec.target import DraftStep, TargetModel
from compressed_spec.tree import TokenTree


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frontier:
    """The nodes that the next head step expands, one level deep.

    candidate_BF: their index among each row's candidates (-1 = the root). score_BF: cumulative score.
    ancestors_BFA: scratch rows of their ancestors in the head's KV. streams_NMD: the stream before each node's token.
    """

    tokens_BF: Ints
    candidate_BF: Ints
    score_BF: torch.Tensor
    ancestors_BFA: Ints
    streams_NMD: torch.Tensor


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
    def propose(self, request: DraftRequest) -> list[TokenTree]:
        """Best-first in levels: the K best nodes of the newest level get K children each; the D - 1 best are kept."""
        cache, num_rows = request.cache, len(request.rows)
        num_children = min(request.shape.top_k, self._model.vocab_size)
        most = num_rows * (1 + (request.shape.num_steps - 1) * num_children)
        if most > cache.shape.max_draft_nodes:
            raise ValueError(
                f"Drafting {request.shape} for {num_rows} rows needs {most} draft nodes, more than the cache's "
                f"{cache.shape.max_draft_nodes}: make it with a larger max_draft_nodes."
            )
        cache.next_ticket()  # the head's scratch rows are also a verification's: one of the two must give way
        pending = cache.pools["pending_stream"][0, list(request.rows)]
        frontier = _Frontier(
            tokens_BF=np.asarray(request.roots, dtype=np.int64)[:, None],
            candidate_BF=np.full((num_rows, 1), -1),
            score_BF=torch.zeros((num_rows, 1), dtype=torch.float64),
            ancestors_BFA=np.empty((num_rows, 1, 0), dtype=np.int64),
            streams_NMD=pending.unflatten(-1, (cache.spec.num_streams, -1)),
        )
        tokens, parents, scores, depths = [], [], [], []
        first, num_candidates = 0, 0
        for depth in range(1, min(request.shape.num_steps, max(request.max_depths)) + 1):
            streams_NMD, ancestors_BFA = self._step(request, frontier, first)
            first += frontier.tokens_BF.size
            score_BFK, token_BFK = self._children(request, streams_NMD, num_children, depth)
            score_BC = (frontier.score_BF.unsqueeze(-1) + score_BFK).flatten(1)
            token_BC = token_BFK.flatten(1).numpy()
            tokens.append(token_BC)
            parents.append(frontier.candidate_BF.repeat(num_children, axis=1))
            scores.append(score_BC)
            depths += [depth] * token_BC.shape[1]
            best_BF = score_BC.topk(min(num_children, score_BC.shape[1]), dim=-1)
            index_BF = best_BF.indices.numpy()
            parent_BF = index_BF // num_children
            offset_B1 = np.arange(num_rows)[:, None] * frontier.tokens_BF.shape[1]
            frontier = _Frontier(
                tokens_BF=np.take_along_axis(token_BC, index_BF, axis=1),
                candidate_BF=num_candidates + index_BF,
                score_BF=best_BF.values,
                ancestors_BFA=np.take_along_axis(ancestors_BFA, parent_BF[:, :, None], axis=1),
                streams_NMD=streams_NMD[torch.from_numpy((offset_B1 + parent_BF).ravel()).to(streams_NMD.device)],
            )
            num_candidates += token_BC.shape[1]
        if not tokens:
            return [TokenTree(tokens=[root], parents=[-1]) for root in request.roots]
        all_tokens, all_parents = np.concatenate(tokens, axis=1), np.concatenate(parents, axis=1)
        # Stable: of equal scores the shallower and earlier wins, so ancestors (never worse) are always kept too.
        order = torch.cat(scores, dim=1).sort(dim=-1, descending=True, stable=True)
        return [
            _best_tree(
                root,
                all_tokens[i],
                all_parents[i],
                order.indices[i],
                order.values[i],
                depths,
                request.shape.num_nodes,
                cap,
            )
            for i, (root, cap) in enumerate(zip(request.roots, request.max_depths, strict=True))
        ]

    def _step(self, request: DraftRequest, frontier: _Frontier, first: int) -> tuple[torch.Tensor, Ints]:
        """Run the head on the frontier; its streams, and the ancestors with the frontier's own rows appended."""
        cache, (num_rows, width) = request.cache, frontier.tokens_BF.shape
        own_BF1 = first + np.arange(num_rows * width).reshape(num_rows, width, 1)
        ancestors_BFA = np.concatenate((frontier.ancestors_BFA, own_BF1), axis=2)
        # The head's row of a root at position n lies at n - 1: one token is folded into the stream before it.
        starts_B = np.asarray([cache.lengths[row] - 1 for row in request.rows], dtype=np.int64)
        nodes = Nodes(
            sequence_T=np.repeat(np.asarray(request.rows, dtype=np.int64), width),
            start_T=np.repeat(starts_B, width),
            depth_T=np.full(num_rows * width, ancestors_BFA.shape[2] - 1),
            ancestors_TA=ancestors_BFA.reshape(num_rows * width, -1),
        )
        rows_NW = window_rows(nodes, cache.spec.sliding_window, cache.shape.batch_size)
        step = DraftStep(
            streams_NMD=frontier.streams_NMD,
            tokens_N=torch.from_numpy(frontier.tokens_BF.ravel()).to(cache.device),
            position_N=torch.from_numpy(nodes.position_T).to(cache.device),
            window_rows_NW=torch.from_numpy(rows_NW).to(cache.device),
            first=first,
        )
        return self._model.draft_step(step, Scratch(cache)), ancestors_BFA

    def _children(
        self, request: DraftRequest, streams_NMD: torch.Tensor, num_children: int, depth: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Score and token of each node's best children, `[B, F, K]`, on the host."""
        num_rows = len(request.rows)
        logits_BFV = self._model.draft_logits(streams_NMD).double().unflatten(0, (num_rows, -1))
        temperature_B = torch.tensor([t or 1.0 for t in request.temperatures], dtype=torch.float64)
        score_BFV = torch.log_softmax(logits_BFV / temperature_B.to(logits_BFV.device).view(-1, 1, 1), dim=-1)
        if request.noise is not None:
            # The noise that will decide the target's token is known: what matters is who wins under it.
            score_BFV = torch.log_softmax(score_BFV + request.noise(depth).unsqueeze(1), dim=-1)
        best = score_BFV.topk(num_children, dim=-1)
        return best.values.cpu(), best.indices.cpu()


def _best_tree(
    root: int,
    tokens_C: Ints,
    parents_C: Ints,
    order_C: torch.Tensor,
    scores_C: torch.Tensor,
    depths_C: Sequence[int],
    num_nodes: int,
    max_depth: int,
) -> TokenTree:
    """The tree of the best candidates of one row; `order_C` lists them best first, with their scores."""
    kept = [
        int(index)
        for index, score in zip(order_C.tolist(), scores_C.tolist(), strict=True)
        if depths_C[index] <= max_depth and score > float("-inf")
    ][: num_nodes - 1]
    kept.sort()
    node_of = {-1: 0} | {index: node for node, index in enumerate(kept, start=1)}
    return TokenTree(
        tokens=[root, *(tokens_C[index] for index in kept)],
        parents=[-1, *(node_of[int(parents_C[index])] for index in kept)],
    )
