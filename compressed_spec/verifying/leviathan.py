"""Token-level speculative sampling (Leviathan et al. 2023, arXiv 2211.17192, section 2.3; Chen et al. 2023).

Shape suffixes: N nodes of one chain, V vocabulary.
"""

from torch import Tensor

from compressed_spec.verifying.interface import (
    Acceptance,
    Coins,
    DraftTree,
    check_sampled,
    draft_probability,
    law,
    residual,
)


class LeviathanVerifier:
    """Sampled chains. Accepts x with min(1, p(x) / q(x)); the first rejection draws from the normalised (p - q)+."""

    name = "leviathan"

    def check(self, draft: DraftTree) -> None:
        """Raise ValueError unless the draft is a chain of fixed length, drawn from `log_q`."""
        check_sampled(draft, self.name, chain=True)

    def verify(self, draft: DraftTree, log_p_NV: Tensor, coins: Coins) -> Acceptance:
        self.check(draft)
        assert draft.log_q is not None
        last = len(draft.tree) - 1
        for node in range(last):
            p_V, q_V = law(log_p_NV[node]), law(draft.log_q[node]).to(log_p_NV.device)
            token = draft.tree.tokens[node + 1]
            if coins.accept(min(1.0, float(p_V[token]) / draft_probability(q_V, token, node + 1))):
                continue
            rest_V = residual(p_V, q_V, weight=1.0)
            # A rejection means p(x) < q(x), hence mass elsewhere, unless p and q differ by rounding alone: then p is
            # the law.
            return Acceptance(
                path=tuple(range(node + 1)), next_token=coins.choose(rest_V if float(rest_V.sum()) > 0 else p_V)
            )
        return Acceptance(path=tuple(range(last + 1)), next_token=coins.choose(law(log_p_NV[last])))
