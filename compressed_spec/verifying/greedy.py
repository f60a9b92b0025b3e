"""Temperature 0: walk the best tokens.

Shape suffixes: N nodes of one tree, V vocabulary.
"""

from torch import Tensor

from compressed_spec.sampling import greedy_tokens
from compressed_spec.verifying.interface import Acceptance, Coins, DraftTree, walk


class GreedyVerifier:
    """Follows argmax; lossless on any tree at temperature 0, and only there. Spends no coins."""

    name = "greedy"

    def check(self, draft: DraftTree) -> None:
        """Every tree fits."""

    def verify(self, draft: DraftTree, log_p_NV: Tensor, coins: Coins) -> Acceptance:
        return walk(draft.tree, greedy_tokens(log_p_NV).tolist())
