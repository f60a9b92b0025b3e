"""Interleaved rotary embedding on the trailing channels of a head.

T = nodes, H = heads, D = head width, P = rotated pairs
"""

import torch


def apply_rope(x_THD: torch.Tensor, cos_TP: torch.Tensor, sin_TP: torch.Tensor) -> torch.Tensor:
    """Rotate the last `2 P` channels, pairs (2i, 2i+1), by the angle of each node; the others pass through.

    A negated `sin_TP` undoes the rotation (V4 does so to the attention's output, because K = V).
    """
    num_rotated = 2 * cos_TP.shape[-1]
    plain, rotated = x_THD[..., :-num_rotated], x_THD[..., -num_rotated:]
    pairs = rotated.unflatten(-1, (-1, 2)).to(cos_TP.dtype)
    even, odd = pairs[..., 0], pairs[..., 1]
    cos, sin = cos_TP.unsqueeze(1), sin_TP.unsqueeze(1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return torch.cat((plain, turned.to(x_THD.dtype)), dim=-1)
