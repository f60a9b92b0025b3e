"""Coins made of uniforms, and the uniforms of a request's own counter streams.

Shape suffixes: V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from compressed_spec.noise import Stream, seed_tensor, uniforms
from compressed_spec.sampling import select_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformCoins:
    """Coins that spend uniforms in [0, 1), from separate sources for accepting and for choosing.

    Coupled noise is that of request `seed` with the root's next token at index `position` of prompt + output.
    """

    accept_uniforms: Iterator[float]
    choose_uniforms: Iterator[float]
    seed: int
    position: int

    def accept(self, probability: float) -> bool:
        assert 0 <= probability <= 1, probability
        return next(self.accept_uniforms) < probability  # strictly: at u = 0 probability 0 must not pass

    def choose(self, weights_V: Tensor) -> int:
        # On the CPU a cumulative sum is sequential, so it never decreases and the inversion below is exact.
        cumulative_V = weights_V.to("cpu", torch.float64).cumsum(dim=-1)
        total = float(cumulative_V[-1])
        assert 0 < total < float("inf"), "weights need a positive, finite sum"
        threshold = next(self.choose_uniforms) * total
        # The first index whose cumulative weight exceeds the threshold has positive weight itself.
        index = int(torch.searchsorted(cumulative_V, threshold, right=True))
        if index == len(cumulative_V):  # u * total rounded up to the total
            index = int(torch.searchsorted(cumulative_V, total))
        return index

    def coupled(self, log_p_V: Tensor, depth: int) -> int:
        seeds = seed_tensor([self.seed], log_p_V.device)
        positions = torch.tensor([self.position + depth], device=log_p_V.device)
        return int(select_tokens(log_p_V[None], seeds, positions))


def verify_coins(seed: int, position: int) -> UniformCoins:
    """The coins of one verification; `position` is the index in prompt + output of the token after the root.

    A round emits at least one token, so no two rounds of a request share a position, and hence a coin.
    """
    return UniformCoins(
        accept_uniforms=uniforms(seed, Stream.ACCEPT, position),
        choose_uniforms=uniforms(seed, Stream.RESIDUAL, position),
        seed=seed,
        position=position,
    )


def draft_coins(seed: int, position: int) -> UniformCoins:
    """The coins that draw one tree of sampled drafts, independent of `verify_coins` at the same position."""
    numbers = uniforms(seed, Stream.DRAFT, position)
    return UniformCoins(accept_uniforms=numbers, choose_uniforms=numbers, seed=seed, position=position)
