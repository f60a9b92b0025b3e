"""Stepping an MTP head: the rows of its nodes, and one level of the tree at a time.

B = batch rows, F = nodes of a level, N = B F nodes of one step, A = levels down to it, M = residual streams,
D = model width, V = vocabulary, W = window
"""

from dataclasses import dataclass

import numpy as np
import torch

from compressed_spec.cache import Scratch
from compressed_spec.drafting.base import DraftRequest
from compressed_spec.drafting.steps import Laws, law_at
from compressed_spec.rows import Ints, Nodes, window_rows
from compressed_spec.target import DraftStep, TargetModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Nodes of a step, as many a row. streams_NMD: the stream that each leaves.

    ancestors_BFA: scratch rows, in the head's KV, of each and of those above it.
    """

    streams_NMD: torch.Tensor
    ancestors_BFA: Ints


class HeadSteps:
    """The steps of one round, before its verification: whatever was verified earlier can no longer be committed.

    Raises ValueError if the cache has too few draft nodes for the request's shape.
    """

    def __init__(self, model: TargetModel, request: DraftRequest) -> None:
        most = len(request.rows) * request.num_draft_nodes
        if most > request.cache.shape.max_draft_nodes:
            raise ValueError(
                f"Drafting {request.shape} for {len(request.rows)} rows needs {most} draft nodes, more than the "
                f"cache's {request.cache.shape.max_draft_nodes}: make it with a larger max_draft_nodes."
            )
        request.cache.next_ticket()  # the head's scratch rows are a verification's too: one of them must give way
        self._model, self._request = model, request
        self._first = 0
        self._level: Level | None = None

    def root(self) -> Laws:
        """The head on the roots, each after the pending stream of its row; its KV rows go to scratch."""
        request = self._request
        pending = request.cache.pools["pending_stream"][0, list(request.rows)]
        return self._process(
            np.asarray(request.roots, dtype=np.int64)[:, None],
            np.empty((len(request.rows), 1, 0), dtype=np.int64),
            pending.unflatten(-1, (request.cache.spec.num_streams, -1)),
        )

    def descend(self, tokens_BF: Ints, parent_BF: Ints) -> Laws:
        """The head on the next level; its KV rows go to scratch."""
        level = self._level
        assert level is not None, "the roots come first"
        offset_B1 = np.arange(len(parent_BF))[:, None] * level.ancestors_BFA.shape[1]
        parents_N = torch.from_numpy((offset_B1 + parent_BF).ravel()).to(level.streams_NMD.device)
        ancestors_BFA = np.take_along_axis(level.ancestors_BFA, parent_BF[:, :, None], axis=1)
        return self._process(tokens_BF, ancestors_BFA, level.streams_NMD[parents_N])

    def _process(self, tokens_BF: Ints, ancestors_BFA: Ints, streams_NMD: torch.Tensor) -> Laws:
        """Run the head on nodes, given the rows above them and the stream before each one's token."""
        cache, (num_rows, width) = self._request.cache, tokens_BF.shape
        own_BF1 = self._first + np.arange(num_rows * width).reshape(num_rows, width, 1)
        ancestors_BFA = np.concatenate((ancestors_BFA, own_BF1), axis=2)
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
            streams_NMD=streams_NMD,
            tokens_N=torch.from_numpy(tokens_BF.ravel()).to(cache.device),
            position_N=torch.from_numpy(nodes.position_T).to(cache.device),
            window_rows_NW=torch.from_numpy(rows_NW).to(cache.device),
            first=self._first,
        )
        self._first += num_rows * width
        streams_NMD = self._model.draft_step(step, Scratch(cache))
        self._level = Level(streams_NMD=streams_NMD, ancestors_BFA=ancestors_BFA)
        logits_BFV = self._model.draft_logits(streams_NMD).unflatten(0, (num_rows, width))
        return Laws(log_q_BFV=law_at(logits_BFV, self._request.temperatures))
