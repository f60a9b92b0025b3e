"""Target-only sampling: draw from the target at each node and follow the token while it is drafted.

Shape suffixes: N nodes of one tree, V vocabulary.

The naive rule of SpecInfer (Miao et al. 2023, arXiv 2305.09781), and what sequential acceptance of a deterministic
top-k tree comes to. No rule accepts more of a deterministic tree: its expected length is the sum, over drafted nodes,
of the target's probability of the path to them.
"""

from torch import Tensor

from compressed_spec.verifying.interface import Acceptance, Coins, DraftTree, descend, law


class TargetVerifier:
    """Samples the target and walks. Lossless on any tree, because the tokens are drawn without regard to it."""

    name = "target"

    def check(self, draft: DraftTree) -> None:
        """Every tree fits: the target's tokens do not depend on it."""

    def verify(self, draft: DraftTree, log_p_NV: Tensor, coins: Coins) -> Acceptance:
        return descend(draft.tree, lambda node, depth: coins.choose(law(log_p_NV[node])))
