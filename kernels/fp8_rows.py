"""Rows of a KV pool in FP8: codes of the channels that are not rotated, the rotated ones in bfloat16, and scales.

A row is bytes: one E4M3 code a plain channel, two bytes a rotated channel, one E8M0 scale a group of 64 plain channels,
and zeros up to a multiple of 16. The scale of a group is the least power of two at which its largest code is at most
448 (deepseek_v4 reference, section 3.1), so a decoded value is the one that the simulated quantisation gives.

R = rows, D = row width, N = plain channels, G = groups, B = bytes of a row
"""

import torch

GROUP = 64  # plain channels that share a scale
E4M3_MAX = 448.0
SMALLEST_PEAK = 1e-4  # of a group, for its scale


def row_bytes(width: int, num_rotated: int) -> int:
    """Bytes of a row whose last `num_rotated` channels are rotated."""
    plain = width - num_rotated
    return -(-(plain + 2 * num_rotated + plain // GROUP) // 16) * 16


def encode_rows(x_RD: torch.Tensor, num_rotated: int) -> torch.Tensor:
    """Rows as uint8 `[R, B]`. Raises ValueError unless the plain channels are whole groups."""
    width = x_RD.shape[1]
    plain = width - num_rotated
    if plain % GROUP:
        raise ValueError(f"FP8 rows need a multiple of {GROUP} channels before the rotated ones, not {plain}.")
    x_RGN = x_RD[:, :plain].float().unflatten(1, (-1, GROUP))
    peak_RG = x_RGN.abs().amax(-1).clamp(min=SMALLEST_PEAK)
    mantissa_RG, exponent_RG = torch.frexp(peak_RG / E4M3_MAX)  # mantissa in [0.5, 1): 0.5 is a power of two
    exponent_RG = exponent_RG - (mantissa_RG == 0.5).to(exponent_RG.dtype)
    codes = torch.ldexp(x_RGN, -exponent_RG.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    parts = (
        codes.flatten(1).view(torch.uint8),
        x_RD[:, plain:].to(torch.bfloat16).contiguous().view(torch.uint8),
        (exponent_RG + 127).to(torch.uint8),
    )
    packed = torch.cat(parts, dim=1)
    return torch.nn.functional.pad(packed, (0, row_bytes(width, num_rotated) - packed.shape[1]))


def decode_rows(packed_RB: torch.Tensor, width: int, num_rotated: int) -> torch.Tensor:
    """What `encode_rows` packed, as float32 `[R, D]`."""
    plain = width - num_rotated
    codes, tail, scales = packed_RB.split((plain, 2 * num_rotated, packed_RB.shape[1] - plain - 2 * num_rotated), dim=1)
    exponent_RG = scales[:, : plain // GROUP].int() - 127
    scale_RG = torch.ldexp(torch.ones_like(exponent_RG, dtype=torch.float32), exponent_RG)
    x_RGN = codes.contiguous().view(torch.float8_e4m3fn).float().unflatten(1, (-1, GROUP)) * scale_RG.unsqueeze(-1)
    return torch.cat((x_RGN.flatten(1), tail.contiguous().view(torch.bfloat16).float()), dim=1)
