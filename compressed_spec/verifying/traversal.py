"""Traversal verification (Weng et al. 2025, arXiv 2505.12398): sampled trees, judged from the leaves up.

Shape suffixes: N nodes of one tree, V vocabulary.

The first remaining leaf, reached by first children, is accepted with its path's weight: w = 1 at the root, and min(1,
w(parent) p(x) / q(x)) below. If it fails, it goes, and its parent's law becomes the normalised (w p - q)+, its weight
R / (R + 1 - w) with R the mass of that residual, and its q loses x where siblings are drawn without replacement; then
the next leaf is tried. A parent that has lost all children is a leaf itself. On a chain this is block verification.
"""

from dataclasses import dataclass

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


@dataclass(slots=True)
class _Node:
    """A node on the path under trial: its laws and weight as the rejections below it have left them."""

    node: int
    children: list[int]
    p_V: Tensor
    q_V: Tensor
    weight: float


class TraversalVerifier:
    """Sampled trees of fixed topology, siblings iid or without replacement. Accepts the first path that passes."""

    name = "traversal"

    def check(self, draft: DraftTree) -> None:
        """Raise ValueError unless the draft is a tree of fixed topology, drawn from `log_q`."""
        check_sampled(draft, self.name, chain=False)

    def verify(self, draft: DraftTree, log_p_NV: Tensor, coins: Coins) -> Acceptance:
        self.check(draft)
        assert draft.log_q is not None
        log_q_NV, tree = draft.log_q, draft.tree

        def enter(node: int, weight: float) -> _Node:
            children = tree.children(node)
            p_V = law(log_p_NV[node])
            q_V = law(log_q_NV[node]).to(p_V.device) if children else p_V
            return _Node(node=node, children=children, p_V=p_V, q_V=q_V, weight=weight)

        path = [enter(0, 1.0)]
        while True:
            tip = path[-1]
            if tip.children:
                child = tip.children[0]
                token = tree.tokens[child]
                ratio = float(tip.p_V[token]) / draft_probability(tip.q_V, token, child)
                path.append(enter(child, min(1.0, tip.weight * ratio)))
            elif len(path) == 1 or coins.accept(tip.weight):  # the root's weight stays 1
                return Acceptance(path=tuple(step.node for step in path), next_token=coins.choose(tip.p_V))
            else:
                path.pop()
                self._reject_first_child(path[-1], tree.tokens[tip.node], bool(draft.replacement))

    @staticmethod
    def _reject_first_child(parent: _Node, token: int, replacement: bool) -> None:
        rest_V = residual(parent.p_V, parent.q_V, parent.weight)
        mass = float(rest_V.sum())
        if mass > 0:
            parent.p_V = rest_V / mass
            parent.weight = mass / (mass + (1 - parent.weight))
        elif parent.weight < 1:
            parent.weight = 0.0  # nothing is left to accept under this node; its law no longer matters
        # else: weight 1 and no residual, so p = q up to rounding, and p stays the law
        parent.children.pop(0)
        if not replacement and parent.children:
            parent.q_V = parent.q_V.index_fill(0, parent.q_V.new_tensor([token]).long(), 0.0)
            parent.q_V = parent.q_V / parent.q_V.sum()
