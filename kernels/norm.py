"""RMS norms, with statistics in float32 or wider.

D = width
"""

import torch


def rms_norm(x_D: torch.Tensor, weight_D: torch.Tensor | None, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight` over the last axis, in x's dtype (deepseek_v4: RMSNorm is fp32 throughout).

    `weight_D` None is the weightless form that V4 applies to each query head.
    """
    wide = torch.promote_types(x_D.dtype, torch.float32)
    x_wide = x_D.to(wide)
    normed = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    if weight_D is not None:
        normed = normed * weight_D.to(wide)
    return normed.to(x_D.dtype)
