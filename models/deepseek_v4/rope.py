"""Rotary tables: plain for sliding layers and draft heads, YaRN for layers that compress (deepseek_v4 reference, RoPE).

N = positions, P = rotated pairs
"""

import math
from dataclasses import dataclass

import torch

from compressed_spec.models.deepseek_v4.config import DeepseekV4Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """cos and sin of the angles at some positions, float32 or wider."""

    cos_NP: torch.Tensor
    sin_NP: torch.Tensor

    @property
    def inverse(self) -> "Rotation":
        return Rotation(cos_NP=self.cos_NP, sin_NP=-self.sin_NP)


def rope_frequencies(config: DeepseekV4Config, *, compress: bool, dtype: torch.dtype) -> torch.Tensor:
    """Angle a position of each pair, `[P]`. compress: base `compress_rope_theta`, with YaRN if the config has it."""
    dim = config.qk_rope_head_dim
    theta = config.compress_rope_theta if compress else config.rope_theta
    frequencies = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim)
    if compress and config.yarn is not None:
        yarn = config.yarn

        def correction(turns: float) -> float:
            return dim * math.log(yarn.original_max_position_embeddings / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(correction(yarn.beta_fast)), 0)
        high = min(math.ceil(correction(yarn.beta_slow)), dim - 1)
        pairs = torch.arange(dim // 2, dtype=torch.float64, device="cpu")
        ramp = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
        frequencies = frequencies / yarn.factor * ramp + frequencies * (1 - ramp)
    return frequencies.to(dtype)


def rotation(frequencies_P: torch.Tensor, position_N: torch.Tensor) -> Rotation:
    """Angles in the frequencies' dtype (float32, as the reference keeps its tables, unless the model is float64)."""
    angles_NP = position_N.to(frequencies_P.dtype).unsqueeze(-1) * frequencies_P
    return Rotation(cos_NP=angles_NP.cos(), sin_NP=angles_NP.sin())
