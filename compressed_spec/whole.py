"""Rounds that a device carries out by itself, from the drafts to the commit; the host sees what they emit.

For rows that are greedy, or sampled by coupled noise from the model's own law, drafted by the model's head in a fixed
shape or decoded plainly. Whatever else is asked for goes through the host, and so do a text's last rounds, whose trees
are cut.

B = batch rows, A = longest path
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from compressed_spec.cache import Cache
from compressed_spec.device_trees import DeviceDraft, DeviceRounds, RoundInputs
from compressed_spec.drafting.base import Drafter, DraftPlan
from compressed_spec.drafting.device_head import HeadDraft
from compressed_spec.drafting.device_steps import DSparkDeviceSteps, MTPDeviceSteps, StepsMaker
from compressed_spec.drafting.dspark import DSparkDrafter
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
    """Over one cache. drafts: for rows of which none is sampled, and for others; None for plain decoding."""

    def __init__(self, cache: Cache, rounds: DeviceRounds, drafts: Mapping[bool, HeadDraft] | None) -> None:
        self._cache, self._rounds, self.drafts = cache, rounds, drafts

    @property
    def num_nodes(self) -> int:
        """Of a tree."""
        return 1 if self.drafts is None else self.drafts[True].num_nodes

    def takes(self, places: Sequence[Place], verifier: Verifier) -> bool:
        """Whether the device alone may decide these rows' next tokens."""
        deepest = 0 if self.drafts is None else self.drafts[True].num_steps
        coupled = isinstance(verifier, CoupledVerifier)
        room = MOST_TREES if self.drafts is None else min(MOST_TREES, self.drafts[True].most_trees)
        return len(places) <= room and all(
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
        size = self.num_nodes
        params = [place.params for place in places for _ in range(size)]
        inputs = RoundInputs(
            rows_B=torch.tensor(rows),
            tokens_T=torch.tensor([place.root for place in places for _ in range(size)]),
            temperature_T=torch.tensor([one.temperature for one in params], dtype=torch.float64),
            seeds_T=seed_tensor([one.seed for one in params]),
        )
        form: tuple[int, ...] | DeviceDraft = (-1,)
        if self.drafts is not None:
            form = self.drafts[not all(one.is_greedy for one in params)]
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
    drafts = None
    if drafter is not None and shaper is not None:
        plan = shaper.largest
        if type(shaper) is not FixedShaper or plan != DraftPlan(shape=plan.shape):
            return None
        drafts = _drafts(model, cache, drafter, plan.shape)
        if drafts is None:
            return None
    rounds = model.device_rounds(cache)
    return None if rounds is None else WholeRounds(cache, rounds, drafts)


def _drafts(model: TargetModel, cache: Cache, drafter: Drafter, shape: TreeShape) -> dict[bool, HeadDraft] | None:
    """What this drafter does, for rows of which none or some are sampled; None where the device cannot."""
    steps: StepsMaker
    if type(drafter) is MTPDrafter:
        steps, num_steps, width, head_nodes = MTPDeviceSteps, shape.num_steps, shape.top_k, shape.num_draft_nodes
    elif type(drafter) is DSparkDrafter and not drafter.confidence_threshold:
        steps, num_steps = DSparkDeviceSteps, min(shape.num_steps, model.draft_block_size)
        width, head_nodes = shape.num_nodes - 1, model.draft_block_size
    else:
        return None
    if shape.top_k > model.vocab_size:
        return None
    return {
        sampled: HeadDraft(
            model,
            cache,
            steps,
            shape,
            num_steps=num_steps,
            width=width,
            head_nodes=head_nodes,
            sampled=sampled,
        )
        for sampled in (False, True)
    }


def _is_plain(params: SamplingParams) -> bool:
    unfiltered = params.top_k == 0 and params.top_p == 1 and params.min_p == 0
    return not params.has_processors and (params.is_greedy or unfiltered)
