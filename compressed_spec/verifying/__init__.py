"""Lossless rules that turn drafted trees into tokens of the target's law."""

from compressed_spec.verifying.block import BlockVerifier
from compressed_spec.verifying.coins import UniformCoins, draft_coins, verify_coins
from compressed_spec.verifying.coupled import CoupledVerifier
from compressed_spec.verifying.enumeration import exact_law
from compressed_spec.verifying.greedy import GreedyVerifier
from compressed_spec.verifying.interface import Acceptance, Coins, DraftTree, Proposal, Verifier, walk
from compressed_spec.verifying.leviathan import LeviathanVerifier
from compressed_spec.verifying.proposals import sampled_children
from compressed_spec.verifying.target import TargetVerifier
from compressed_spec.verifying.traversal import TraversalVerifier

__all__ = [
    "Acceptance",
    "Coins",
    "CoupledVerifier",
    "DraftTree",
    "GreedyVerifier",
    "Proposal",
    "TargetVerifier",
    "UniformCoins",
    "Verifier",
    "draft_coins",
    "exact_law",
    "make_verifier",
    "sampled_children",
    "verify_coins",
    "walk",
]


def make_verifier(name: str) -> Verifier:
    """The verifier of this name, for temperatures above 0 (at 0: `GreedyVerifier`). Raises ValueError if unknown."""
    verifiers: list[Verifier] = [
        CoupledVerifier(),
        TargetVerifier(),
        LeviathanVerifier(),
        BlockVerifier(),
        TraversalVerifier(),
    ]
    for verifier in verifiers:
        if verifier.name == name:
            return verifier
    raise ValueError(f"Unknown verifier {name!r}: use one of {', '.join(repr(v.name) for v in verifiers)}.")
