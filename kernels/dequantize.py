"""Block-scaled FP8 and FP4 weights to float32, in plain torch.

Shape suffixes: O output rows, I input columns, P = I / 2 bytes of packed FP4, B row blocks, C column blocks,
G = I / 32 groups. Formats are those of the DeepSeek-V4 checkpoints: value = code * scale, where an E8M0 byte b means
2 ** (b - 127).
"""

import torch

FP4_GROUP = 32  # columns that share one FP4 scale
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # magnitudes of codes 0..7; bit 3 is the sign


def dequantize_fp8(
    weight_OI: torch.Tensor, scale_BC: torch.Tensor, block: tuple[int, int], offset: tuple[int, int] = (0, 0)
) -> torch.Tensor:
    """E4M3 weights with one scale a block, as float32 [O, I]; edge blocks may be partial.

    weight_OI: float8_e4m3fn. scale_BC: float8_e8m0fnu or a float type, one a block that the weights touch. offset: row
    and column of the first weight in the first block, for a part of a matrix that begins inside one.
    One float32 multiply a weight: exact for power-of-two scales, rounded to nearest for others.
    """
    rows, cols = weight_OI.shape
    (block_rows, block_cols), (row, col) = block, offset
    assert weight_OI.dtype == torch.float8_e4m3fn, f"FP8 weights are float8_e4m3fn, not {weight_OI.dtype}"
    assert row in range(block_rows), "the first block is the one that holds the first weight"
    assert col in range(block_cols), "the first block is the one that holds the first weight"
    assert scale_BC.shape == (-(-(row + rows) // block_rows), -(-(col + cols) // block_cols)), "one scale a block"
    out_OI = weight_OI.to(torch.float32)
    scale_BI = scale_BC.to(torch.float32).repeat_interleave(block_cols, dim=1)[:, col : col + cols]
    head = min(-row % block_rows, rows)
    if head:
        out_OI[:head].mul_(scale_BI[0])
        scale_BI = scale_BI[1:]
    whole = (rows - head) // block_rows
    edge = head + whole * block_rows
    out_OI[head:edge].view(whole, block_rows, cols).mul_(scale_BI[:whole, None])
    if edge < rows:
        out_OI[edge:].mul_(scale_BI[whole])
    return out_OI


def dequantize_fp4(packed_OP: torch.Tensor, scale_OG: torch.Tensor) -> torch.Tensor:
    """E2M1 weights packed two a byte (low nibble = even column), one scale per row and 32 columns, as float32 [O, I].

    packed_OP: int8 or uint8. scale_OG: float8_e8m0fnu or a float type. Exact: codes have two significant bits.
    """
    rows, num_bytes = packed_OP.shape
    assert packed_OP.dtype in (torch.int8, torch.uint8), f"packed FP4 is int8 or uint8, not {packed_OP.dtype}"
    assert scale_OG.shape == (rows, num_bytes * 2 // FP4_GROUP), "one scale per row and 32 columns"
    codes = torch.tensor(_E2M1 + tuple(-value for value in _E2M1), device=packed_OP.device)
    pairs = torch.stack((codes.repeat(16), codes.repeat_interleave(16)), dim=-1)  # [256, 2]: low nibble first
    # One 8-byte gather a byte of weights: a pair travels as an int64, about three times faster than as two floats.
    index = packed_OP.view(torch.uint8).flatten().to(torch.int32)
    out_OI = pairs.view(torch.int64).flatten().index_select(0, index).view(torch.float32).view(rows, num_bytes * 2)
    out_OI.view(rows, -1, FP4_GROUP).mul_(scale_OG.to(torch.float32)[:, :, None])
    return out_OI
