"""When a round's nodes go through the layers in their compiled form, and which rows that form writes.

T = nodes
"""

from dataclasses import dataclass

import torch

from compressed_spec.cache import Scratch
from compressed_spec.rows import RowPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Few:
    """Up to how much a compiled layer is the faster one. Beyond, experts are grouped, and keys scored as ranges.

    nodes: of a round, all sequences together. keys: that the indexer gathers a layer, all nodes together.
    """

    nodes: int
    keys: int

    def takes(self, plan: RowPlan) -> bool:
        """Whether a round is small enough."""
        num_nodes = len(plan.tokens_T)
        scored = [comp.num_visible for comp in plan.compressions.values() if comp.listed_TK is None]
        return num_nodes <= self.nodes and num_nodes * max(scored, default=0) <= self.keys


def written_rows(plan: RowPlan, scratch: Scratch) -> dict[str, torch.Tensor]:
    """Rows that the round writes, by pool of the layers: one a node, or (entries) one a window that closes."""
    device = plan.tokens_T.device
    slot_T = torch.arange(len(plan.tokens_T), device=device) if plan.slot_T is None else plan.slot_T
    slots = {"window_kv": slot_T}
    for name, comp in plan.compressions.items():
        slots |= dict.fromkeys((f"buffer.{name}", f"index_buffer.{name}"), slot_T)
        slots |= dict.fromkeys((f"compressed_kv.{name}", f"index_kv.{name}"), comp.closing_slot_C)
    return {pool: scratch.row_ids(pool, slot_N) for pool, slot_N in slots.items() if scratch.has(pool)}
