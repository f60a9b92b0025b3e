"""What may carry out a model's layers in place of their modules.

T = nodes, N = draft nodes, M = residual streams, D = model width
"""

from typing import Protocol

import torch

from compressed_spec.cache import Cache, Scratch
from compressed_spec.device_trees import DeviceRounds
from compressed_spec.kernels.commit import MoveRows
from compressed_spec.partial import LayerStreams
from compressed_spec.rows import RowPlan
from compressed_spec.target import DraftBlock, DraftStep


class LayerPath(Protocol):
    """`DeepseekV4`'s methods of these names, for a scratch that is written in place."""

    def advance(self, plan: RowPlan, scratch: Scratch, before: LayerStreams, num_layers: int) -> LayerStreams:
        """On through the layers up to `num_layers`, writing their rows."""
        ...

    def finish(self, plan: RowPlan, scratch: Scratch, after: LayerStreams) -> None:
        """Write the rows that are a draft head's."""
        ...

    def draft_hidden(self, tokens_N: torch.Tensor, block: DraftBlock, scratch: Scratch) -> torch.Tensor:
        """A DSpark head's one output stream `[N, D]` at each place of the blocks; writes their KV rows."""
        ...

    def draft_step(self, step: DraftStep, scratch: Scratch) -> torch.Tensor:
        """The MTP head's own streams `[N, M, D]` after a step; writes its KV rows."""
        ...

    def row_mover(self) -> MoveRows:
        """What moves the rows of one cache's commits."""
        ...

    def rounds(self, cache: Cache) -> DeviceRounds | None:
        """Rounds over a cache that the device carries out by itself, if this model has such."""
        ...
