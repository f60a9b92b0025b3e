"""Stepping an MTP head: the rows of its nodes, and one level of the tree at a time.

B = batch rows, F = nodes of a level, N = B F nodes of one step, M = residual streams, D = model width, V = vocabulary,
W = window
"""

from dataclasses import dataclass

import numpy as np
import torch

from compressed_spec.cache import Scratch
from compressed_spec.drafting.base import DraftRequest
from compressed_spec.drafting.steps import Laws, law_at
from compressed_spec.rows import Ints
from compressed_spec.target import DraftStep, TargetModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Nodes of a step, as many a row. streams_NMD: the stream that each leaves. window_BFW: rows of the head's KV that
    each read, by ring slot, its own among them.
    """

    streams_NMD: torch.Tensor
    window_BFW: Ints


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
        self._rows_B = np.array(request.rows, dtype=np.int64)
        # The head's row of a root at position n lies at n - 1: one token is folded into the stream before it.
        self._position_B = np.array([request.cache.lengths[row] - 1 for row in request.rows], dtype=np.int64)
        self._first = 0
        self._level: Level | None = None

    def root(self) -> Laws:
        """The head on the roots, each after the pending stream of its row; its KV rows go to scratch."""
        request, spec = self._request, self._request.cache.spec
        slot_W = np.arange(spec.sliding_window)
        ring_BW = self._rows_B[:, None] * spec.sliding_window + slot_W
        window_BW = np.where(slot_W < self._position_B[:, None], ring_BW, -1)
        pending_BX = request.cache.pools["pending_stream"][0].index_select(0, self._tensor(self._rows_B))
        return self._process(
            np.array(request.roots, dtype=np.int64)[:, None],
            window_BW[:, None],
            pending_BX.view(len(pending_BX), spec.num_streams, -1),
        )

    def descend(self, tokens_BF: Ints, parent_BF: Ints) -> Laws:
        """The head on the next level; its KV rows go to scratch."""
        level = self._level
        assert level is not None, "the roots come first"
        self._position_B += 1
        row_B1 = np.arange(len(parent_BF))[:, None]
        parents_N = (row_B1 * level.window_BFW.shape[1] + parent_BF).reshape(-1)
        return self._process(
            tokens_BF, level.window_BFW[row_B1, parent_BF], level.streams_NMD.index_select(0, self._tensor(parents_N))
        )

    def _process(self, tokens_BF: Ints, window_BFW: Ints, streams_NMD: torch.Tensor) -> Laws:
        """Run the head on nodes, given the stream before each one's token, and what their parents read.

        A node reads what its parent read, but for its own row, which takes the slot of the oldest one.
        """
        cache, (num_rows, width) = self._request.cache, tokens_BF.shape
        row_B1, own_N = np.arange(num_rows)[:, None], np.arange(self._first, self._first + num_rows * width)
        slot_B1 = self._position_B[:, None] % cache.spec.sliding_window
        own_rows_N = cache.num_persistent("head_kv") + own_N
        window_BFW[row_B1, np.arange(width), slot_B1] = own_rows_N.reshape(num_rows, width)
        step = DraftStep(
            streams_NMD=streams_NMD,
            tokens_N=self._tensor(tokens_BF.reshape(-1)),
            position_N=self._tensor(self._position_B.repeat(width)),
            window_rows_NW=self._tensor(window_BFW.reshape(num_rows * width, -1)),
            first=self._first,
        )
        self._first += num_rows * width
        drafted = self._model.draft_step(step, Scratch(cache))
        self._level = Level(streams_NMD=drafted.streams_NMD, window_BFW=window_BFW)
        logits_BFV = drafted.logits_NV.view(num_rows, width, -1)
        return Laws(log_q_BFV=law_at(logits_BFV, self._request.temperatures))

    def _tensor(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(array).to(self._request.cache.device)
