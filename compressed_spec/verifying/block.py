"""Block verification (Sun et al. 2024, arXiv 2403.10444): the whole chain is judged jointly.

Shape suffixes: N nodes of one chain, V vocabulary.

With w_0 = 1, w_i = min(1, w_{i-1} p(x_i) / q(x_i)) and R_i = sum over V of (w_i p - q)+ after i drafts, prefix i of g
drafts passes its own coin with h_i = R_i / (R_i + 1 - w_i), the whole chain with h_g = w_g. The longest prefix that
passes is accepted (a failed shorter one does not matter), then a token is drawn from the normalised (w_i p - q)+, or
p after the whole chain. No other rule for one sampled path has a longer expected acceptance.
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


class BlockVerifier:
    """Accepts the longest prefix whose joint coin passes. Sampled chains."""

    name = "block"

    def check(self, draft: DraftTree) -> None:
        """Raise ValueError unless the draft is a chain of fixed length, drawn from `log_q`."""
        check_sampled(draft, self.name, chain=True)

    def verify(self, draft: DraftTree, log_p_NV: Tensor, coins: Coins) -> Acceptance:
        self.check(draft)
        assert draft.log_q is not None
        last = len(draft.tree) - 1
        p, q = [law(row) for row in log_p_NV], [law(row).to(log_p_NV.device) for row in draft.log_q[:last]]

        weights = [1.0]
        for node in range(last):
            token = draft.tree.tokens[node + 1]
            ratio = float(p[node][token]) / draft_probability(q[node], token, node + 1)
            weights.append(min(1.0, weights[-1] * ratio))

        if coins.accept(weights[last]):
            return Acceptance(path=tuple(range(last + 1)), next_token=coins.choose(p[last]))
        for node in range(last - 1, -1, -1):
            rest_V = residual(p[node], q[node], weights[node])
            mass = float(rest_V.sum())
            if mass > 0 and coins.accept(mass / (mass + (1 - weights[node]))):
                return Acceptance(path=tuple(range(node + 1)), next_token=coins.choose(rest_V))
        # The root's weight is 1, so it passes unless it has no residual: then p = q there up to rounding, and p is
        # the law.
        return Acceptance(path=(0,), next_token=coins.choose(p[0]))
