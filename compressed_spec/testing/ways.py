"""Ways to get a text into a row of a cache that must all leave the same state.

V = vocabulary, B = batch rows, T = nodes
"""

import itertools
from collections.abc import Callable, Sequence

import torch

from compressed_spec.cache import Cache
from compressed_spec.target import TargetModel
from compressed_spec.tree import TokenTree

# (model, cache, row, text) -> the target's logits `[V]` after the text's last token
Way = Callable[[TargetModel, Cache, int, Sequence[int]], torch.Tensor]


def at_once(model: TargetModel, cache: Cache, row: int, text: Sequence[int]) -> torch.Tensor:
    return model.prefill(cache, [text], rows=[row])[0]


def in_pieces(model: TargetModel, cache: Cache, row: int, text: Sequence[int]) -> torch.Tensor:
    """Several prefills of uneven length."""
    logits_BV = torch.empty(0)
    sizes = itertools.cycle((5, 1, 90))
    start = 0
    while start < len(text):
        stop = start + next(sizes)
        logits_BV = model.prefill(cache, [text[start:stop]], rows=[row])
        start = stop
    return logits_BV[0]


def after_rejected_rounds(model: TargetModel, cache: Cache, row: int, text: Sequence[int]) -> torch.Tensor:
    """Whole trees are rejected along the way and at the end: nothing of them may stay."""
    wrong = TokenTree(tokens=[5, 6, 7, 8, 9, 10, 11], parents=[-1, 0, 0, 1, 3, 4, 2])
    logits_BV = torch.empty(0)
    for start in range(0, len(text), 110):
        logits_BV = model.prefill(cache, [text[start : start + 110]], rows=[row])
        for _ in range(2):
            cache.commit(model.verify(cache, [wrong], rows=[row]), [[]])
    return logits_BV[0]


def one_by_one(model: TargetModel, cache: Cache, row: int, text: Sequence[int]) -> torch.Tensor:
    """A prefill, then rounds of a single node in which nobody drafts."""
    start = max(len(text) - 9, 0)
    if start:
        model.prefill(cache, [text[:start]], rows=[row])
    logits_TV = torch.empty(0)
    for token in text[start:]:
        verify = model.verify(cache, [TokenTree(tokens=[token], parents=[-1])], rows=[row])
        cache.commit(verify, [[0]])
        logits_TV = verify.logits
    return logits_TV[-1]


def along_trees(model: TargetModel, cache: Cache, row: int, text: Sequence[int]) -> torch.Tensor:
    """A prefill, then trees of which one path, with wrong siblings at every depth, holds the text's next tokens."""
    start = max(len(text) - 25, 0)
    if start:
        model.prefill(cache, [text[:start]], rows=[row])
    logits_V = torch.empty(0)
    while start < len(text):
        piece = text[start : start + 5]
        tokens, parents, path = [piece[0]], [-1], [0]
        for token in piece[1:]:
            tokens += [(token + 1) % model.vocab_size, token, (token + 2) % model.vocab_size]
            parents += [path[-1]] * 3
            path.append(len(tokens) - 2)
        verify = model.verify(cache, [TokenTree(tokens=tokens, parents=parents)], rows=[row])
        cache.commit(verify, [path])
        logits_V = verify.logits[path[-1]]
        start += len(piece)
    return logits_V


WAYS: tuple[Way, ...] = (at_once, in_pieces, after_rejected_rounds, one_by_one, along_trees)
