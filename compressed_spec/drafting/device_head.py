"""Best-first trees of an MTP head, drafted without the host: what `MTPDrafter` proposes for a shape, as tensors.

B = trees, F = nodes of a level, K = children a node, C = candidates of a tree, D = nodes of a tree, T = B D nodes,
M = residual streams, N = head nodes, V = vocabulary
"""

from dataclasses import dataclass

import torch

from compressed_spec.cache import Cache, Scratch
from compressed_spec.device_trees import DeviceTrees, DraftedTrees, RoundInputs
from compressed_spec.noise import coupled_scores, gumbel_noise
from compressed_spec.target import DraftStep, TargetModel
from compressed_spec.tree import TreeShape


@dataclass(slots=True, kw_only=True)
class _HeadNodes:
    """The head's nodes so far, level after level; a node's scratch row is its index. streams_NMD: of the newest."""

    parents_N: torch.Tensor
    sequence_N: torch.Tensor
    streams_NMD: torch.Tensor
    num_levels: int = 0


class HeadDraft:
    """A `DeviceDraft`. sampled: whether any row's temperature is above 0, so that noise decides."""

    def __init__(self, model: TargetModel, cache: Cache, shape: TreeShape, *, sampled: bool) -> None:
        assert shape.top_k <= model.vocab_size, "as many children as tokens"
        self._model, self._cache, self.shape, self._sampled = model, cache, shape, sampled

    @property
    def key(self) -> tuple[int, ...]:
        return (self.shape.num_steps, self.shape.top_k, self.shape.num_nodes, self._sampled)

    @property
    def num_nodes(self) -> int:
        return self.shape.num_nodes

    def __call__(self, inputs: RoundInputs, lengths_B: torch.Tensor) -> DraftedTrees:
        """See `DeviceDraft`."""
        rows_B = inputs.rows_B.clamp(min=0)
        roots_B, temperature_B, seeds_B = (
            tensor.unflatten(0, (len(rows_B), -1))[:, 0]
            for tensor in (inputs.tokens_T, inputs.temperature_T, inputs.seeds_T)
        )
        place_B = torch.arange(len(rows_B), device=rows_B.device)
        pending_BX = self._cache.pools["pending_stream"][0][rows_B]
        nodes = _HeadNodes(
            parents_N=place_B.new_empty(0),
            sequence_N=place_B.new_empty(0),
            streams_NMD=pending_BX.unflatten(-1, (self._cache.spec.num_streams, -1)),
        )
        width, top_k = self.shape.top_k, self.shape.top_k
        token_BF, parent_BF = roots_B.unsqueeze(1), torch.full_like(roots_B, -1).unsqueeze(1)
        candidate_BF, score_BF = torch.full_like(token_BF, -1), temperature_B.new_zeros(token_BF.shape)
        tokens: list[torch.Tensor] = []
        parents: list[torch.Tensor] = []
        scores: list[torch.Tensor] = []
        for depth in range(1, self.shape.num_steps + 1):
            logits_BFV = self._level(nodes, token_BF, parent_BF, rows_B, lengths_B)
            edge_BFV = self._edges(logits_BFV, temperature_B, seeds_B, lengths_B[rows_B] + depth)
            best = edge_BFV.topk(top_k, dim=-1)
            score_BC = (score_BF.unsqueeze(-1) + best.values.clamp(max=0)).flatten(1)
            token_BC, first = best.indices.flatten(1), sum(part.shape[1] for part in tokens)
            tokens.append(token_BC)
            parents.append(candidate_BF.repeat_interleave(top_k, dim=1))
            scores.append(score_BC)
            newest = score_BC.topk(min(width, score_BC.shape[1]), dim=-1)
            token_BF, parent_BF = token_BC.gather(1, newest.indices), newest.indices // top_k
            candidate_BF, score_BF = first + newest.indices, newest.values
        return self._trees(roots_B, torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1))

    def _level(
        self,
        nodes: _HeadNodes,
        token_BF: torch.Tensor,
        parent_BF: torch.Tensor,
        rows_B: torch.Tensor,
        lengths_B: torch.Tensor,
    ) -> torch.Tensor:
        """The head on the next level, `parent_BF` in the one before; logits `[B, F, V]`."""
        from compressed_spec.kernels.row_plan_triton import NodeTable, node_table, window_rows

        (num_trees, width), cache, first = token_BF.shape, self._cache, len(nodes.parents_N)
        if nodes.num_levels:
            above_BF = parent_BF + torch.arange(num_trees, device=rows_B.device).unsqueeze(1) * (
                len(nodes.streams_NMD) // num_trees
            )
            parent_N = (first - len(nodes.streams_NMD) + above_BF).flatten()
            streams_NMD = nodes.streams_NMD[above_BF.flatten()]
        else:
            parent_N, streams_NMD = parent_BF.flatten(), nodes.streams_NMD
        nodes.num_levels += 1
        nodes.parents_N = torch.cat((nodes.parents_N, parent_N))
        nodes.sequence_N = torch.cat((nodes.sequence_N, rows_B.repeat_interleave(width)))
        slot_N = torch.arange(len(nodes.parents_N), device=rows_B.device)
        # The head's row of a root at position n lies at n - 1: one token is folded into the stream before it.
        table = node_table(nodes.parents_N, nodes.sequence_N, lengths_B - 1, slot_N, nodes.num_levels)
        newest = NodeTable(
            sequence_T=table.sequence_T[first:],
            start_T=table.start_T[first:],
            position_T=table.position_T[first:],
            slot_T=table.slot_T[first:],
            ancestors_TA=table.ancestors_TA[first:],
            parent_stream_T=table.parent_stream_T[first:],
        )
        step = DraftStep(
            streams_NMD=streams_NMD,
            tokens_N=token_BF.flatten(),
            position_N=newest.position_T,
            window_rows_NW=window_rows(newest, cache.spec.sliding_window, cache.shape.batch_size),
            first=first,
        )
        nodes.streams_NMD = self._model.draft_step(step, Scratch(cache))
        logits_BFV: torch.Tensor = self._model.draft_logits(nodes.streams_NMD).unflatten(0, (num_trees, width))
        return logits_BFV

    def _edges(
        self, logits_BFV: torch.Tensor, temperature_B: torch.Tensor, seeds_B: torch.Tensor, position_B: torch.Tensor
    ) -> torch.Tensor:
        """Scores of all children, as `law_at` and `Scoring.edges` have them."""
        divisor_B = torch.where(temperature_B > 0, temperature_B, 1.0)
        log_q_BFV = torch.log_softmax(logits_BFV.double() / divisor_B.view(-1, 1, 1), dim=-1)
        if not self._sampled:
            return log_q_BFV
        noise_BV = gumbel_noise(seeds_B, position_B, logits_BFV.shape[-1])
        noise_BV = noise_BV.masked_fill_((temperature_B == 0).unsqueeze(1), 0.0)
        return coupled_scores(log_q_BFV, noise_BV.unsqueeze(1))

    def _trees(
        self, roots_B: torch.Tensor, token_BC: torch.Tensor, parent_BC: torch.Tensor, score_BC: torch.Tensor
    ) -> DraftedTrees:
        """The D - 1 best of each tree in the order of candidates, so that parents come first."""
        num_trees, size = len(roots_B), self.shape.num_nodes
        # Stable: of equal scores the shallower and earlier wins, so ancestors (never worse) are always kept too.
        order_BC = score_BC.sort(dim=-1, descending=True, stable=True).indices
        kept_BD = order_BC[:, : size - 1].sort(dim=-1).values
        place_D = torch.arange(1, size, device=roots_B.device).expand(num_trees, -1)
        node_BC = torch.zeros_like(token_BC).scatter_(1, kept_BD, place_D)
        above_BD = parent_BC.gather(1, kept_BD)
        node_BD = torch.where(above_BD < 0, 0, node_BC.gather(1, above_BD.clamp(min=0)))
        first_B1 = torch.arange(num_trees + 1, device=roots_B.device) * size
        parents_BD = torch.cat((torch.full_like(roots_B, -1).unsqueeze(1), first_B1[:-1, None] + node_BD), dim=1)
        trees = DeviceTrees(
            parents_T=parents_BD.flatten(),
            tree_T=torch.arange(num_trees, device=roots_B.device).repeat_interleave(size),
            slot_T=torch.arange(num_trees * size, device=roots_B.device),
            first_B1=first_B1,
            longest=self.shape.num_steps + 1,
            most_nodes=size,
            num_closing={
                comp.name: num_trees * self._most_closing(comp.ratio) for comp in self._cache.spec.compressions
            },
        )
        tokens_BD = torch.cat((roots_B.unsqueeze(1), token_BC.gather(1, kept_BD)), dim=1)
        return DraftedTrees(trees=trees, tokens_T=tokens_BD.flatten())

    def _most_closing(self, ratio: int) -> int:
        """Nodes of a tree that may close a window at once, whatever its form."""
        top_k, deeper = self.shape.top_k, self.shape.num_steps - 1
        candidates = [1, top_k, *[top_k * top_k] * deeper]
        most = max(sum(candidates[phase::ratio]) for phase in range(min(ratio, len(candidates))))
        return min(most, self.shape.num_nodes)
