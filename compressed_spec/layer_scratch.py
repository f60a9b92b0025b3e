"""Where the nodes of one layer are written, as tensors alone: for layers that are compiled.

R = rows of a pool, N = rows written, D = row width
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerScratch:
    """A layer's rows `[R, D]` in each pool that it writes to, and which of them (`[N]`, int64) this forward writes."""

    pools: Mapping[str, torch.Tensor]
    rows: Mapping[str, torch.Tensor]

    def write(
        self, pool: str, layer: int, values_ND: torch.Tensor, first: int = 0, *, slots: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `Scratch.write`; layer, first and slots have gone into the tensors."""
        rows_RD = self.pools[pool]
        return rows_RD.index_copy_(0, self.rows[pool], values_ND.to(rows_RD.dtype))
