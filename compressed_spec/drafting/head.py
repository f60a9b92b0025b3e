"""Stepping a draft head: the rows of its nodes, and one level of the tree at a time.

B = batch rows, F = nodes of a level, N = B F nodes of one step, A = levels above, M = residual streams,
D = model width, V = vocabulary, W = window
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from compressed_spec.cache import Scratch
from compressed_spec.drafting.base import DraftRequest
from compressed_spec.rows import Ints, Nodes, window_rows
from compressed_spec.target import DraftStep, TargetModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Nodes to process, as many a row. ancestors_BFA: scratch rows of those above them in the head's KV.

    streams_NMD: the stream before each node's token.
    """

    tokens_BF: Ints
    ancestors_BFA: Ints
    streams_NMD: torch.Tensor

    def children(self, processed: "Processed", tokens_BF: Ints, parent_BF: Ints) -> "Level":
        """The next level: these tokens, each after the node of this level that `parent_BF` names in its row."""
        offset_B1 = np.arange(len(parent_BF))[:, None] * self.tokens_BF.shape[1]
        parents_N = torch.from_numpy((offset_B1 + parent_BF).ravel()).to(processed.streams_NMD.device)
        return Level(
            tokens_BF=tokens_BF,
            ancestors_BFA=np.take_along_axis(processed.ancestors_BFA, parent_BF[:, :, None], axis=1),
            streams_NMD=processed.streams_NMD[parents_N],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Processed:
    """A level after its step. ancestors_BFA: as the next level needs them, with the level's own rows.

    log_q_BFV: float64, the head's law after each node, at the row's temperature.
    """

    streams_NMD: torch.Tensor
    ancestors_BFA: Ints
    log_q_BFV: torch.Tensor


class HeadSteps:
    """The steps of one round, before its verification: whatever was verified earlier can no longer be committed.

    Raises ValueError if the cache has too few draft nodes for `most` of them."""

    def __init__(self, model: TargetModel, request: DraftRequest, most: int) -> None:
        if most > request.cache.shape.max_draft_nodes:
            raise ValueError(
                f"Drafting {request.shape} for {len(request.rows)} rows needs {most} draft nodes, more than the "
                f"cache's {request.cache.shape.max_draft_nodes}: make it with a larger max_draft_nodes."
            )
        request.cache.next_ticket()  # the head's scratch rows are a verification's too: one of them must give way
        self._model, self._request = model, request
        self._first = 0

    def root(self) -> Level:
        """The roots, each after the pending stream of its row."""
        request = self._request
        pending = request.cache.pools["pending_stream"][0, list(request.rows)]
        return Level(
            tokens_BF=np.asarray(request.roots, dtype=np.int64)[:, None],
            ancestors_BFA=np.empty((len(request.rows), 1, 0), dtype=np.int64),
            streams_NMD=pending.unflatten(-1, (request.cache.spec.num_streams, -1)),
        )

    def process(self, level: Level) -> Processed:
        """Run the head on a level; its KV rows go to scratch."""
        cache, (num_rows, width) = self._request.cache, level.tokens_BF.shape
        own_BF1 = self._first + np.arange(num_rows * width).reshape(num_rows, width, 1)
        ancestors_BFA = np.concatenate((level.ancestors_BFA, own_BF1), axis=2)
        # The head's row of a root at position n lies at n - 1: one token is folded into the stream before it.
        starts_B = np.asarray([cache.lengths[row] - 1 for row in self._request.rows], dtype=np.int64)
        nodes = Nodes(
            sequence_T=np.repeat(np.asarray(self._request.rows, dtype=np.int64), width),
            start_T=np.repeat(starts_B, width),
            depth_T=np.full(num_rows * width, ancestors_BFA.shape[2] - 1),
            ancestors_TA=ancestors_BFA.reshape(num_rows * width, -1),
        )
        rows_NW = window_rows(nodes, cache.spec.sliding_window, cache.shape.batch_size)
        step = DraftStep(
            streams_NMD=level.streams_NMD,
            tokens_N=torch.from_numpy(level.tokens_BF.ravel()).to(cache.device),
            position_N=torch.from_numpy(nodes.position_T).to(cache.device),
            window_rows_NW=torch.from_numpy(rows_NW).to(cache.device),
            first=self._first,
        )
        self._first += num_rows * width
        streams_NMD = self._model.draft_step(step, Scratch(cache))
        return Processed(
            streams_NMD=streams_NMD,
            ancestors_BFA=ancestors_BFA,
            log_q_BFV=_law(self._model.draft_logits(streams_NMD), self._request.temperatures),
        )


def _law(logits_NV: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    """Log law `[B, F, V]` at each row's temperature; greedy rows are ranked at temperature 1."""
    logits_BFV = logits_NV.double().unflatten(0, (len(temperatures), -1))
    temperature_B = torch.tensor([t or 1.0 for t in temperatures], dtype=torch.float64, device=logits_NV.device)
    return torch.log_softmax(logits_BFV / temperature_B.view(-1, 1, 1), dim=-1)
