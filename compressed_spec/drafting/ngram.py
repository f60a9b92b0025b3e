"""Prompt lookup: what followed the same few tokens earlier in this text."""

from collections import defaultdict
from collections.abc import Sequence

from compressed_spec.drafting.base import DraftRequest
from compressed_spec.tree import TokenTree


class _History:
    """The tokens of one row, and where each n-gram of them ended."""

    def __init__(self, max_ngram: int) -> None:
        self.tokens: list[int] = []
        self._max_ngram = max_ngram
        self._ends: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def extend(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            self.tokens.append(token)
            end = len(self.tokens)
            for n in range(1, min(self._max_ngram, end) + 1):
                self._ends[tuple(self.tokens[end - n :])].append(end)

    def continuations(self, limit: int) -> list[int]:
        """Where earlier occurrences of the newest n-gram ended: longest n first, then newest first."""
        found: dict[int, None] = {}
        end = len(self.tokens)
        for n in range(min(self._max_ngram, end), 0, -1):
            for start in reversed(self._ends[tuple(self.tokens[end - n :])]):
                if start < end:
                    found.setdefault(start)
                if len(found) == limit:
                    return list(found)
        return list(found)


class NgramDrafter:
    """Proposes the continuations of the longest recent match, merged into a tree (chain for K = 1).

    max_ngram: longest match looked for. Needs no weights and no training.
    """

    def __init__(self, max_ngram: int = 4) -> None:
        self._max_ngram = max_ngram
        self._histories: dict[int, _History] = {}

    def start(self, row: int, token_ids: Sequence[int]) -> None:
        self._histories[row] = _History(self._max_ngram)
        self._histories[row].extend(token_ids)

    def observe(self, row: int, token_ids: Sequence[int]) -> None:
        self._histories[row].extend(token_ids)

    def release(self, row: int) -> None:
        self._histories.pop(row, None)

    def propose(self, request: DraftRequest) -> list[TokenTree]:
        """A tree a row: at most N deep, K children a node, D nodes."""
        return [
            self._tree(self._histories[row], root, min(request.shape.num_steps, cap), request)
            for row, root, cap in zip(request.rows, request.roots, request.max_depths, strict=True)
        ]

    def _tree(self, history: _History, root: int, max_depth: int, request: DraftRequest) -> TokenTree:
        tokens, parents = [root], [-1]
        children: dict[int, dict[int, int]] = defaultdict(dict)
        for start in history.continuations(limit=request.shape.top_k * request.shape.num_nodes):
            node = 0
            for token in history.tokens[start : start + max_depth]:
                if token not in children[node]:
                    if len(children[node]) == request.shape.top_k or len(tokens) == request.shape.num_nodes:
                        break
                    children[node][token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = children[node][token]
        return TokenTree(tokens=tokens, parents=parents)
