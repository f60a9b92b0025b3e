"""Rounds that a device carries out by itself, from the drafts to the commit; the host sees what they emit.

For rows that are greedy, or sampled by coupled noise from the model's own law, drafted by an MTP head in a fixed shape
or decoded plainly. Whatever else is asked for goes through the host, and so do a text's last rounds, whose trees are
cut.

B = batch rows, A = longest path
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compressed_spec.cache import Cache
from compressed_spec.device_trees import DeviceDraft, DeviceRounds, RoundInputs
from compressed_spec.drafting.base import Drafter, DraftPlan
from compressed_spec.drafting.device_head import HeadDraft
from compressed_spec.drafting.mtp import MTPDrafter
from compressed_spec.noise import seed_tensor
from compressed_spec.proposing import Place
from compressed_spec.sampling_params import SamplingParams
from compressed_spec.shaping.base import FixedShaper, Shaper
from compressed_spec.target import TargetModel
from compressed_spec.tree import TreeShape
from compressed_spec.verifying import Acceptance, CoupledVerifier, Verifier

MOST_TREES = 64  # of a round


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeEnd:
    """How a tree ended. acceptance: nodes of the path, and the token after it; tokens: the path's, root first."""

    acceptance: Acceptance
    tokens: tuple[int, ...]


class WholeRounds:
    """Over one cache. shape: None for plain decoding."""

    def __init__(self, model: TargetModel, cache: Cache, rounds: DeviceRounds, shape: TreeShape | None) -> None:
        self._model, self._cache, self._rounds, self.shape = model, cache, rounds, shape

    def takes(self, places: Sequence[Place], verifier: Verifier) -> bool:
        """Whether the device alone may decide these rows' next tokens."""
        deepest = 0 if self.shape is None else self.shape.num_steps
        coupled = isinstance(verifier, CoupledVerifier)
        return len(places) <= MOST_TREES and all(
            place.max_depth >= deepest and _is_plain(place.params) and (coupled or place.params.is_greedy)
            for place in places
        )

    def run(self, places: Sequence[Place]) -> list[WholeEnd]:
        """One round, committed. Raises ValueError for logits without a best token; if it raises, the rows are refused
        until released.
        """
        cache, rows = self._cache, [place.row for place in places]
        cache.check_rows(rows)
        cache.mark_damaged(rows)  # until the host knows what was accepted
        size = 1 if self.shape is None else self.shape.num_nodes
        params = [place.params for place in places for _ in range(size)]
        inputs = RoundInputs(
            rows_B=torch.tensor(rows),
            tokens_T=torch.tensor([place.root for place in places for _ in range(size)]),
            temperature_T=torch.tensor([one.temperature for one in params], dtype=torch.float64),
            seeds_T=seed_tensor([one.seed for one in params]),
        )
        form: tuple[int, ...] | DeviceDraft = (-1,)
        if self.shape is not None:
            sampled = not all(one.is_greedy for one in params)
            form = HeadDraft(self._model, cache, self.shape, sampled=sampled)
        self._rounds.follow(cache.lengths)
        with torch.no_grad():
            outputs = self._rounds(form, inputs, max(cache.lengths))
            counts = torch.stack((outputs.count_B, outputs.next_token_B), dim=1)
            found = torch.cat((counts, outputs.path_BA, outputs.token_BA), dim=1).tolist()  # the one wait of a round
        ends = []
        for tree, (count, next_token, *path) in enumerate(found):
            if next_token < 0:
                raise ValueError(f"Row {rows[tree]} of the logits has no token with a finite score; check the model.")
            nodes, tokens = path[:count], path[len(path) // 2 :][:count]
            acceptance = Acceptance(path=tuple(node - tree * size for node in nodes), next_token=next_token)
            ends.append(WholeEnd(acceptance=acceptance, tokens=tuple(tokens)))
        cache.committed(rows, [len(end.tokens) for end in ends])
        return ends


def whole_rounds(
    model: TargetModel, cache: Cache, drafter: Drafter | None, shaper: Shaper | None
) -> WholeRounds | None:
    """What the model's device can do by itself with this drafter and these shapes; None for nothing."""
    shape = None
    if drafter is not None and shaper is not None:
        plan = shaper.largest
        if type(shaper) is not FixedShaper or type(drafter) is not MTPDrafter or plan != DraftPlan(shape=plan.shape):
            return None
        if plan.shape.top_k > model.vocab_size:
            return None
        shape = plan.shape
    rounds = model.device_rounds(cache)
    return None if rounds is None else WholeRounds(model, cache, rounds, shape)


def _is_plain(params: SamplingParams) -> bool:
    unfiltered = params.top_k == 0 and params.top_p == 1 and params.min_p == 0
    return not params.has_processors and (params.is_greedy or unfiltered)
