"""Pooling a window of raw compressor rows into one entry (paper section 2.3).

R = pool rows, C = windows closed, K = tokens pooled, E = entry width
"""

import torch

from compressed_spec.kernels.gather import gather_rows


def pool_windows(buffer_RD: torch.Tensor, rows_CK: torch.Tensor, *, overlap: bool) -> torch.Tensor:
    """Entries `[C, E]`: per channel, kv weighted by the softmax of the gates over the K tokens.

    A buffer row is `kv | gate`. Plain (HCA): both are E wide. With overlap (CSA): both are 2 E wide, K covers two
    windows, and the older window gives the first E channels, the newer one the last E. Row -1 pools as nothing.
    """
    kv, gate = gather_rows(buffer_RD, rows_CK).chunk(2, dim=-1)
    gate = gate.masked_fill((rows_CK < 0).unsqueeze(-1), float("-inf"))
    if overlap:
        half, width = rows_CK.shape[1] // 2, kv.shape[-1] // 2
        kv = torch.cat((kv[:, :half, :width], kv[:, half:, width:]), dim=1)
        gate = torch.cat((gate[:, :half, :width], gate[:, half:, width:]), dim=1)
    # Tokens innermost: over an outer axis, torch's softmax treats the last few channels by another formula, which
    # would make them depend on how many windows close at once.
    kv_CEK, gate_CEK = kv.transpose(1, 2).contiguous(), gate.transpose(1, 2).contiguous()
    return (kv_CEK * torch.softmax(gate_CEK, dim=-1)).sum(-1)
