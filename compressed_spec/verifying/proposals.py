"""Drawing sampled drafts from a drafter's law.

Shape suffixes: V vocabulary.
"""

from torch import Tensor

from compressed_spec.verifying.interface import Coins, law


def sampled_children(log_q_V: Tensor, count: int, replacement: bool, coins: Coins) -> list[int]:
    """`count` child tokens drawn from q, in order of drawing, independently or without replacement.

    Without replacement the list is shorter where q has fewer than `count` tokens; that depends on the node's path
    alone, never on the drawn values, so the topology still counts as fixed. Raises ValueError for a count below 1.
    """
    if count < 1:
        raise ValueError(f"A node needs at least one drawn child, got {count}.")
    weights_V = law(log_q_V)
    if replacement:
        return [coins.choose(weights_V) for _ in range(count)]
    tokens = []
    for _ in range(min(count, int((weights_V > 0).sum()))):
        tokens.append(coins.choose(weights_V))
        weights_V[tokens[-1]] = 0.0
    return tokens
