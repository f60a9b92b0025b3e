"""Best-first trees of a draft head, made without the host: what the head's drafter proposes for a shape, as tensors.

B = trees, F = nodes of a level, K = children a node, C = candidates of a tree, D = nodes of a tree, T = B D nodes,
V = vocabulary
"""

import torch

from compressed_spec.cache import Cache
from compressed_spec.device_trees import DeviceTrees, DraftedTrees, RoundInputs
from compressed_spec.drafting.device_steps import StepsMaker
from compressed_spec.noise import coupled_scores, gumbel_noise
from compressed_spec.target import TargetModel
from compressed_spec.tree import TreeShape


class HeadDraft:
    """A `DeviceDraft`: the D - 1 best of at most `num_steps` levels, in each of which the `width` best of the level
    before have K children. head_nodes: that the head processes for a tree. sampled: whether any row's temperature is
    above 0, so that noise decides.
    """

    def __init__(
        self,
        model: TargetModel,
        cache: Cache,
        steps: StepsMaker,
        shape: TreeShape,
        *,
        num_steps: int,
        width: int,
        head_nodes: int,
        sampled: bool,
    ) -> None:
        assert shape.top_k <= model.vocab_size, "as many children as tokens"
        self._model, self._cache, self._steps, self._top_k = model, cache, steps, shape.top_k
        self.num_steps, self._width, self._sampled = num_steps, width, sampled
        self._candidates = [shape.top_k]  # by level
        while len(self._candidates) < num_steps:
            self._candidates.append(min(width, self._candidates[-1]) * shape.top_k)
        self._num_nodes = min(shape.num_nodes, 1 + sum(self._candidates))
        self.most_trees = max(cache.shape.num_slots, cache.shape.max_draft_nodes) // head_nodes

    @property
    def key(self) -> tuple[int, ...]:
        return (self.num_steps, self._width, self._top_k, self._num_nodes, self._sampled)

    @property
    def num_nodes(self) -> int:
        return self._num_nodes

    def __call__(self, inputs: RoundInputs, lengths_B: torch.Tensor) -> DraftedTrees:
        """See `DeviceDraft`."""
        rows_B = inputs.rows_B.clamp(min=0)
        roots_B, temperature_B, seeds_B = (
            tensor.unflatten(0, (len(rows_B), -1))[:, 0]
            for tensor in (inputs.tokens_T, inputs.temperature_T, inputs.seeds_T)
        )
        length_B = lengths_B[rows_B]
        steps = self._steps(self._model, self._cache, rows_B, roots_B, length_B)
        token_BF, parent_BF = roots_B.unsqueeze(1), torch.zeros_like(roots_B).unsqueeze(1)
        candidate_BF, score_BF = torch.full_like(token_BF, -1), temperature_B.new_zeros(token_BF.shape)
        tokens: list[torch.Tensor] = []
        parents: list[torch.Tensor] = []
        scores: list[torch.Tensor] = []
        for depth in range(1, self.num_steps + 1):
            logits_BFV = steps.root() if depth == 1 else steps.descend(token_BF, parent_BF)
            best = self._edges(logits_BFV, temperature_B, seeds_B, length_B + depth).topk(self._top_k, dim=-1)
            score_BC = (score_BF.unsqueeze(-1) + best.values.clamp(max=0)).flatten(1)
            token_BC, first = best.indices.flatten(1), sum(self._candidates[: depth - 1])
            tokens.append(token_BC)
            parents.append(candidate_BF.repeat_interleave(self._top_k, dim=1))
            scores.append(score_BC)
            newest = score_BC.topk(min(self._width, score_BC.shape[1]), dim=-1)
            token_BF, parent_BF = token_BC.gather(1, newest.indices), newest.indices // self._top_k
            candidate_BF, score_BF = first + newest.indices, newest.values
        return self._trees(roots_B, torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1))

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
        num_trees, size = len(roots_B), self._num_nodes
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
            longest=self.num_steps + 1,
            most_nodes=size,
            num_closing={
                comp.name: num_trees * self._most_closing(comp.ratio) for comp in self._cache.spec.compressions
            },
        )
        tokens_BD = torch.cat((roots_B.unsqueeze(1), token_BC.gather(1, kept_BD)), dim=1)
        return DraftedTrees(trees=trees, tokens_T=tokens_BD.flatten())

    def _most_closing(self, ratio: int) -> int:
        """Nodes of a tree that may close a window at once, whatever its form."""
        levels = [1, *self._candidates]
        most = max(sum(levels[phase::ratio]) for phase in range(min(ratio, len(levels))))
        return min(most, self._num_nodes)
