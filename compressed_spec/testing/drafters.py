"""Drafters that know the future, that are always wrong, and that draw at random."""

import random
from collections.abc import Sequence

from compressed_spec.drafting.base import DraftRequest
from compressed_spec.topology import tree_around
from compressed_spec.tree import TokenTree


class ScriptedDrafter:
    """Drafts from the full texts (prompt and continuation) that its requests are known to become.

    A tree is the text's continuation as a chain of `num_steps`, each node preceded by `top_k - 1` wrong siblings, as
    far as `num_nodes` reach. `right(round)` says whether a round tells the truth (default: always); if not, every
    token is replaced by a wrong one. vocab_size: of the model.
    """

    def __init__(self, texts: Sequence[Sequence[int]], vocab_size: int) -> None:
        self._texts, self._vocab_size = [list(text) for text in texts], vocab_size
        self._rows: dict[int, list[int]] = {}
        self.num_rounds = 0

    def right(self, number: int) -> bool:
        """Whether round `number` drafts what will come."""
        return True

    def start(self, row: int, token_ids: Sequence[int]) -> None:
        self._rows[row] = list(token_ids)

    def observe(self, row: int, token_ids: Sequence[int]) -> None:
        self._rows[row] += token_ids

    def release(self, row: int) -> None:
        self._rows.pop(row, None)

    def propose(self, request: DraftRequest) -> list[TokenTree]:
        right = self.right(self.num_rounds)
        self.num_rounds += 1
        return [self._tree(row, root, right, request) for row, root in zip(request.rows, request.roots, strict=True)]

    def _tree(self, row: int, root: int, right: bool, request: DraftRequest) -> TokenTree:
        past = self._rows[row]
        text = next((text for text in self._texts if text[: len(past)] == past), past)
        future = text[len(past) :]
        if not right:
            future = [(token + request.shape.top_k) % self._vocab_size for token in future]
        return tree_around(root, future, request.shape, self._vocab_size)


class OracleDrafter(ScriptedDrafter):
    """Always drafts what the target will emit: a whole chain is accepted every round."""


class WrongDrafter(ScriptedDrafter):
    """Never drafts what the target will emit (so long as the vocabulary has 2 `top_k` tokens)."""

    def right(self, number: int) -> bool:
        return False


class AlternatingDrafter(ScriptedDrafter):
    """Right in even rounds, wrong in odd ones."""

    def right(self, number: int) -> bool:
        return number % 2 == 0


class RandomDrafter:
    """Random tokens on a random tree within the request's caps; the same seed draws the same trees."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._vocab_size, self._random = vocab_size, random.Random(seed)

    def start(self, row: int, token_ids: Sequence[int]) -> None:
        pass

    def observe(self, row: int, token_ids: Sequence[int]) -> None:
        pass

    def release(self, row: int) -> None:
        pass

    def propose(self, request: DraftRequest) -> list[TokenTree]:
        return [
            random_tree(self._random, root, num_nodes=request.shape.num_nodes, vocab_size=self._vocab_size)
            for root in request.roots
        ]


def random_tree(rng: random.Random, root: int, *, num_nodes: int, vocab_size: int) -> TokenTree:
    """A tree of `num_nodes` random tokens; deep or wide, as it falls. Siblings may repeat each other's token."""
    reach = rng.choice((1, 2, num_nodes))  # how far back a parent may lie: 1 draws a chain
    parents = [-1] + [rng.randrange(max(0, node - reach), node) for node in range(1, num_nodes)]
    return TokenTree(tokens=[root, *(rng.randrange(vocab_size) for _ in range(num_nodes - 1))], parents=parents)
