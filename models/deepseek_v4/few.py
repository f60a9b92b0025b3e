"""What a model asks of its forward of few nodes, and which rows that forward writes.

T = nodes
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from compressed_spec.cache import Scratch
from compressed_spec.kernels.commit import Moves
from compressed_spec.partial import LayerStreams
from compressed_spec.rows import RowPlan
from compressed_spec.target import DraftBlock, DraftStep, StepDraft


class FewNodes(Protocol):
    """A forward for rounds small enough; each method is as the model's own of the same name."""

    def takes(self, plan: RowPlan) -> bool:
        """Whether a round is small enough."""

    def takes_nodes(self, num_nodes: int) -> bool:
        """Whether so many nodes are few enough for what scores no keys."""

    def forward(self, plan: RowPlan, scratch: Scratch) -> torch.Tensor:
        """The streams `[T, M, D]` after the last layer."""

    def advance(self, plan: RowPlan, scratch: Scratch, before: LayerStreams, num_layers: int) -> LayerStreams:
        """On through the layers up to `num_layers`."""

    def logits(self, streams_TMD: torch.Tensor) -> torch.Tensor:
        """Next-token logits `[T, V]`."""

    def draft_step(self, step: DraftStep, scratch: Scratch) -> StepDraft:
        """One step of the MTP head."""

    def draft_hidden(self, tokens_N: torch.Tensor, block: DraftBlock, scratch: Scratch) -> torch.Tensor:
        """A DSpark head's one output stream `[N, D]` at each place of the blocks."""

    def move_rows(self, pools: Sequence[torch.Tensor], lane_of: Sequence[int], moves: Moves) -> None:
        """The rows of a commit (a `MoveRows`)."""


def written_rows(plan: RowPlan, scratch: Scratch) -> dict[str, torch.Tensor]:
    """Rows that the round writes, by pool: one a node, or (entries) one a window that closes."""
    device = plan.tokens_T.device
    slot_T = torch.arange(len(plan.tokens_T), device=device) if plan.slot_T is None else plan.slot_T
    slots = dict.fromkeys(("window_kv", "pending_stream", "head_kv"), slot_T)
    for name, comp in plan.compressions.items():
        slots |= dict.fromkeys((f"buffer.{name}", f"index_buffer.{name}"), slot_T)
        slots |= dict.fromkeys((f"compressed_kv.{name}", f"index_kv.{name}"), comp.closing_slot_C)
    found: dict[tuple[int, int], torch.Tensor] = {}  # many pools begin their scratch rows alike
    rows = {}
    for pool, slot_N in slots.items():
        if scratch.has(pool):
            first = scratch.first_row(pool)
            key = (id(slot_N), first)
            if key not in found:
                found[key] = slot_N + first
            rows[pool] = found[key]
    return rows
