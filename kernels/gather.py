"""Reading rows of a pool by id, where -1 reads nothing.

R = pool rows, T = nodes, K = list length, D = row width
"""

import torch


def gather_rows(pool_RD: torch.Tensor, rows_TK: torch.Tensor) -> torch.Tensor:
    """Rows of a pool, `[T, K, D]`; zeros where the id is -1.

    The zeros are written and not multiplied in: a row nobody owns may hold NaN.
    """
    gathered_TKD = pool_RD[rows_TK.clamp(min=0)]
    return gathered_TKD.masked_fill((rows_TK < 0).unsqueeze(-1), 0.0)
