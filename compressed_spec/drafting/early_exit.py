"""Self-speculation: the model's first layers propose through its own head, and verification goes on from there.

A model that was not trained to be read early exits badly: its streams after a third of the layers are not yet what its
head reads, so few of its drafts are accepted. It costs speed, never the text. LayerSkip (arXiv 2404.16710) is such a
training; Draft & Verify (2309.08168) is the idea without one.

B = batch rows, F = nodes of a level, N = B F nodes of one step, A = levels down to it, V = vocabulary
"""

from collections.abc import Sequence

import numpy as np
import torch

from compressed_spec.cache import Scratch
from compressed_spec.drafting.base import DraftRequest, ScoredTree, StatelessDrafter
from compressed_spec.drafting.best_first import best_first_trees
from compressed_spec.drafting.ranked import ranked_trees
from compressed_spec.drafting.sampled import sampled_trees
from compressed_spec.drafting.steps import Laws, law_at
from compressed_spec.partial import LayerStreams, Stopped
from compressed_spec.rows import Ints, Nodes, plan_nodes
from compressed_spec.target import TargetModel
from compressed_spec.verifying import Coins, DraftTree


class EarlyExitSteps:
    """The first layers on the nodes of one round, which the cache keeps for its verification.

    Whatever was verified earlier can no longer be committed.
    Raises ValueError if the cache has too few slots for the request's shape.
    """

    def __init__(self, model: TargetModel, request: DraftRequest, exit_layer: int) -> None:
        cache, most = request.cache, len(request.rows) * request.num_draft_nodes
        if most > cache.shape.num_slots:
            raise ValueError(
                f"Drafting {request.shape} for {len(request.rows)} rows takes {most} nodes through the first layers, "
                f"more than the cache's {cache.shape.num_slots}: make it with a larger max_nodes."
            )
        self._model, self._request, self._exit_layer = model, request, exit_layer
        self._ticket = cache.next_ticket()
        self._levels: list[LayerStreams] = []
        self._slot_of: dict[tuple[int, int, int], int] = {}
        self._ancestors_BFA = np.empty((len(request.rows), 1, 0), dtype=np.int64)

    def root(self) -> Laws:
        """The roots through the first layers."""
        return self._process(np.asarray(self._request.roots, dtype=np.int64)[:, None], self._ancestors_BFA)

    def descend(self, tokens_BF: Ints, parent_BF: Ints) -> Laws:
        """The next level through the first layers."""
        return self._process(tokens_BF, np.take_along_axis(self._ancestors_BFA, parent_BF[:, :, None], axis=1))

    def _process(self, tokens_BF: Ints, ancestors_BFA: Ints) -> Laws:
        """Nodes of the next level, given the slots of those above them."""
        cache, rows, (num_rows, width) = self._request.cache, self._request.rows, tokens_BF.shape
        first = sum(len(level.newest) for level in self._levels)
        own_BF = first + np.arange(num_rows * width).reshape(num_rows, width)
        for i, row in enumerate(rows):
            for above, token, slot in zip(
                ancestors_BFA[i].tolist(), tokens_BF[i].tolist(), own_BF[i].tolist(), strict=True
            ):
                self._slot_of.setdefault((row, above[-1] if above else -1, token), slot)
        self._ancestors_BFA = np.concatenate((ancestors_BFA, own_BF[:, :, None]), axis=2)
        nodes = Nodes(
            sequence_T=np.repeat(np.asarray(rows, dtype=np.int64), width),
            start_T=np.repeat(np.asarray([cache.lengths[row] for row in rows], dtype=np.int64), width),
            depth_T=np.full(num_rows * width, ancestors_BFA.shape[2]),
            ancestors_TA=self._ancestors_BFA.reshape(num_rows * width, -1),
        )
        plan = plan_nodes(cache.spec, cache.shape, nodes, tokens_BF.ravel(), cache.device)
        after = self._model.advance(plan, Scratch(cache, plan.slot_T), self._model.begin(plan), self._exit_layer)
        self._levels.append(after)
        cache.keep(Stopped(slot_of=self._slot_of, levels=tuple(self._levels)), self._ticket)
        logits_BFV = self._model.logits(after.newest).unflatten(0, (num_rows, width))
        return Laws(log_q_BFV=law_at(logits_BFV, self._request.temperatures))


class EarlyExitDrafter(StatelessDrafter):
    """Drafts with the first `exit_layer` layers, by default a third of them, and the model's own output head.

    It keeps no state of its own, and needs no head. Verified nodes that it processed skip those layers, so that a round
    costs one pass over its verified nodes, and the first layers for drafts that were dropped. Which layer pays is best
    measured: `measure.exit_layer`. Works badly with a model that was not trained to exit early.
    Raises ValueError for a layer that is not between the model's first and last.
    """

    def __init__(self, model: TargetModel, exit_layer: int | None = None) -> None:
        num_layers = model.state_spec().num_layers
        exit_layer = max(1, num_layers // 3) if exit_layer is None else exit_layer
        if not 1 <= exit_layer < num_layers:
            remedy = f"choose 1 .. {num_layers - 1}" if num_layers > 1 else "use drafter='ngram'"
            raise ValueError(
                f"Exit after layer {exit_layer} of {num_layers} leaves no layer to draft with or none to verify with: "
                f"{remedy}."
            )
        self._model, self.exit_layer = model, exit_layer

    @torch.no_grad()
    def propose_sampled(self, request: DraftRequest, coins: Sequence[Coins]) -> list[DraftTree]:
        """Trees drawn from the early law, in the topology asked for, or fixed by the shape alone."""
        return sampled_trees(self._steps(request), request, coins, num_steps=request.shape.num_steps)

    @torch.no_grad()
    def propose(self, request: DraftRequest) -> list[ScoredTree]:
        """Best-first in levels, as the MTP head's; with a topology instead: its positions, by rank."""
        if request.topology is not None:
            return ranked_trees(self._steps(request), request, request.topology)
        shape = request.shape
        return best_first_trees(self._steps(request), request, num_steps=shape.num_steps, width=shape.top_k)

    def _steps(self, request: DraftRequest) -> EarlyExitSteps:
        return EarlyExitSteps(self._model, request, self.exit_layer)
