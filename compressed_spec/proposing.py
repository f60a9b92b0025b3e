"""From a plan to trees that may be verified: the request that a drafter gets, and what is usable of its answer.

B = batch rows, V = vocabulary
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compressed_spec.cache import Cache
from compressed_spec.drafting.base import Drafter, DraftPlan, DraftRequest, SamplingDrafter, usable_tree
from compressed_spec.noise import gumbel_noise, seed_tensor
from compressed_spec.sampling_params import SamplingParams
from compressed_spec.tree import TokenTree
from compressed_spec.verifying import DraftTree, Proposal, Verifier, draft_coins


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one tree shall grow: a batch row and its newest token.

    position: index in the text of the token after the root. max_depth: how deep the tree may reach.
    """

    row: int
    root: int
    position: int
    max_depth: int
    params: SamplingParams


class Proposer:
    """Asks a drafter for trees, in the way that the verifier needs, and takes no more of them than may be verified."""

    def __init__(self, cache: Cache, drafter: Drafter, verifier: Verifier, proposal: Proposal, vocab_size: int) -> None:
        self._cache, self._drafter, self._verifier = cache, drafter, verifier
        self._proposal, self._vocab_size = proposal, vocab_size

    def draws(self, places: Sequence[Place]) -> bool:
        """Whether these trees will be drawn from a law."""
        return self._proposal is Proposal.SAMPLED and not all(place.params.is_greedy for place in places)

    def propose(self, places: Sequence[Place], plan: DraftPlan) -> list[TokenTree | DraftTree]:
        """The drafter's answer, as it is. Raises whatever it raises, and TypeError for what are no trees."""
        request = self._request(places, plan)
        trees: list[TokenTree | DraftTree]
        if self.draws(places):
            assert isinstance(self._drafter, SamplingDrafter)
            coins = [draft_coins(place.params.seed, place.position) for place in places]
            trees = list(self._drafter.propose_sampled(request, coins))
        else:
            trees = list(self._drafter.propose(request))
        if strange := [tree for tree in trees if not isinstance(tree, TokenTree | DraftTree)]:
            raise TypeError(f"A drafter's propose must give TokenTree or DraftTree, not {strange[0]!r}.")
        return trees

    def usable(self, draft: TokenTree | DraftTree, place: Place, max_nodes: int) -> DraftTree:
        """What may be verified of a proposed tree."""
        tree = draft.tree if isinstance(draft, DraftTree) else draft
        if isinstance(draft, DraftTree) and draft.proposal is Proposal.SAMPLED:
            self._verifier.check(draft)
            # Nothing may be dropped from a sampled tree because of its values: it is taken whole or not at all.
            fits = tree.tokens[0] == place.root and len(tree) <= max_nodes and max(tree.depths) <= place.max_depth
            if fits and all(0 <= token < self._vocab_size for token in tree.tokens):
                return draft
            max_nodes = 1
        tree = usable_tree(
            tree, place.root, vocab_size=self._vocab_size, max_nodes=max_nodes, max_depth=place.max_depth
        )
        return DraftTree(tree=tree, proposal=Proposal.DETERMINISTIC, fixed_topology=False)

    def _request(self, places: Sequence[Place], plan: DraftPlan) -> DraftRequest:
        params, device = [place.params for place in places], self._cache.device

        def noise(depth: int) -> torch.Tensor:
            positions_B = torch.tensor([place.position + depth - 1 for place in places], device=device)
            noise_BV = gumbel_noise(seed_tensor([p.seed for p in params], device), positions_B, self._vocab_size)
            greedy_B1 = torch.tensor([[p.is_greedy] for p in params], device=device)
            return noise_BV.masked_fill_(greedy_B1, 0.0)

        coupled = self._proposal is Proposal.COUPLED and not all(p.is_greedy for p in params)
        return DraftRequest(
            cache=self._cache,
            rows=tuple(place.row for place in places),
            roots=tuple(place.root for place in places),
            shape=plan.shape,
            topology=plan.topology,
            scoring=plan.scoring,
            max_depths=tuple(place.max_depth for place in places),
            temperatures=tuple(p.temperature for p in params),
            noise=noise if coupled else None,
        )
