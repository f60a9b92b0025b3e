"""Nodes that have gone through a model's first layers only, and what of that a verification may go on from.

What a node leaves in those layers depends on the tokens on its path alone, so that a verified node whose path was
drafted there takes over its slot and its streams.

T = nodes of a forward, N = nodes that stopped, M = residual streams, D = model width
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from compressed_spec.rows import Ints
from compressed_spec.tree import TokenTree


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStreams:
    """Nodes that have gone through the first `num_layers` layers, whose rows of these lie in scratch.

    streams: by layer `[T, M, D]`, after the newest layer (-1: the embedding), and after those that a draft head reads.
    """

    num_layers: int
    streams: Mapping[int, torch.Tensor]

    @property
    def newest(self) -> torch.Tensor:
        return self.streams[self.num_layers - 1]

    @classmethod
    def cat(cls, parts: Sequence["LayerStreams"]) -> "LayerStreams":
        """Several nodes' after the same layers, in this order."""
        first = parts[0]
        return cls(
            num_layers=first.num_layers,
            streams={layer: torch.cat([part.streams[layer] for part in parts]) for layer in first.streams},
        )

    def take(self, index_T: torch.Tensor) -> "LayerStreams":
        return LayerStreams(
            num_layers=self.num_layers, streams={layer: tensor[index_T] for layer, tensor in self.streams.items()}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What the nodes of trees, one after the other, take over. slot_T: of each, the new ones' included."""

    slot_T: Ints
    new_T: NDArray[np.bool_]

    @property
    def source_T(self) -> Ints:
        """Index of a node's streams among those of the nodes that stopped, followed by the new ones'."""
        return np.where(self.new_T, np.cumsum(self.new_T) - 1 - self.new_T.sum(), self.slot_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """Nodes that stopped after the same layer, in slots 0 .. N; `levels` hold their streams in this order.

    slot_of: slot by batch row, slot of the parent (-1 above a root), and token.
    """

    slot_of: Mapping[tuple[int, int, int], int]
    levels: tuple[LayerStreams, ...]

    def claim(self, trees: Sequence[TokenTree], rows: Sequence[int]) -> Claim | None:
        """What trees that grow from these batch rows find here, None for nothing. New nodes get slots left free."""
        found: list[int | None] = []
        taken: set[int] = set()
        slots: list[int] = []  # -1 for a new node
        for tree, row in zip(trees, rows, strict=True):
            first = len(found)
            for token, parent in zip(tree.tokens, tree.parents, strict=True):
                above = -1 if parent < 0 else found[first + parent]
                slot = None if above is None else self.slot_of.get((row, above, token))
                found.append(slot)
                # Of siblings with one token the first takes the slot; below them, what was found is right for either.
                slots.append(-1 if slot is None or slot in taken else slot)
                taken.add(slots[-1])
        slot_T = np.asarray(slots, dtype=np.int64)
        new_T = slot_T < 0
        if new_T.all():
            return None
        free = np.setdiff1d(np.arange(len(slot_T)), slot_T)
        slot_T[new_T] = free[: new_T.sum()]
        return Claim(slot_T=slot_T, new_T=new_T)
