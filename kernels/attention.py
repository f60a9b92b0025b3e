"""Attention of each node over listed rows: its window and its compressed entries, jointly, with a sink a head.

R = pool rows, T = nodes, H = heads, D = head width, W = window, K = compressed entries listed
"""

import torch

from compressed_spec.kernels.gather import gather_rows


def sparse_attention(
    q_THD: torch.Tensor,
    window_RD: torch.Tensor,
    window_rows_TW: torch.Tensor,
    compressed_RD: torch.Tensor | None,
    compressed_rows_TK: torch.Tensor | None,
    sink_H: torch.Tensor,
) -> torch.Tensor:
    """`softmax(q k / sqrt(D))` with `exp(sink)` added to the denominator, times k (K = V), as `[T, H, D]`.

    Row -1 reads nothing. Scores and probabilities are float32 or wider.
    """
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    kv_TKD, rows_TK = gather_rows(window_RD, window_rows_TW), window_rows_TW
    if compressed_RD is not None and compressed_rows_TK is not None:
        kv_TKD = torch.cat((kv_TKD, gather_rows(compressed_RD, compressed_rows_TK)), dim=1)
        rows_TK = torch.cat((rows_TK, compressed_rows_TK), dim=1)
    scores_THK = torch.bmm(q_THD, kv_TKD.transpose(1, 2)).to(wide) * q_THD.shape[-1] ** -0.5
    scores_THK = scores_THK.masked_fill((rows_TK < 0).unsqueeze(1), float("-inf"))
    sink_TH1 = sink_H.to(wide).view(1, -1, 1).expand(scores_THK.shape[0], -1, -1)
    probs_THK = torch.softmax(torch.cat((scores_THK, sink_TH1), dim=-1), dim=-1)[..., :-1]
    return torch.bmm(probs_THK.to(kv_TKD.dtype), kv_TKD)
