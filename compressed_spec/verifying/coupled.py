"""Coupled noise: the target's token at a position is argmax(log p + g), whatever was drafted.

Shape suffixes: N nodes of one tree, V vocabulary.

Daliri, Musco and Suresh 2024 (arXiv 2408.07978) couple a drafter with its target by shared Gumbel noise; a drafter
that ranks tokens by log q + g then matches with probability at least (1 - TV) / (1 + TV) a token.
"""

from torch import Tensor

from compressed_spec.verifying.interface import Acceptance, Coins, DraftTree, descend


class CoupledVerifier:
    """Walks the target's own coupled tokens. Lossless on any tree, and equal to plain sampling with the same seed.

    For many trees at once, `target_tokens` and `walk` do the same with one argmax for all nodes.
    """

    name = "coupled"

    def check(self, draft: DraftTree) -> None:
        """Every tree fits: the target's tokens do not depend on it."""

    def verify(self, draft: DraftTree, log_p_NV: Tensor, coins: Coins) -> Acceptance:
        return descend(draft.tree, lambda node, depth: coins.coupled(log_p_NV[node], depth))
