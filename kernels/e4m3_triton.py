"""E4M3 codes in registers, bit by bit: Triton has the type only from sm_89, and this must also run on sm_80.

And bfloat16, to which Triton's interpreter does not round but cuts off.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl


@triton.jit
def encode_e4m3(x):
    """Codes (uint8) of float32 numbers, rounded to nearest even as torch does, of magnitude 448 at most; NaN stays."""
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    bits = tl.minimum(tl.abs(x), 448.0).to(tl.uint32, bitcast=True)
    # Normal: keep three bits of mantissa, and move the exponent's bias from 127 to 7.
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are multiples of 2^-9, the last bit of numbers about 2^14.
    small = (bits.to(tl.float32, bitcast=True) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(bits < 0x3C800000, small, normal)
    return (tl.where(x == x, code, 0x7F) | sign).to(tl.uint8)


@triton.jit
def encode_bf16(x):
    """bfloat16 bits (uint16) of float32 numbers, rounded to nearest even; NaN stays."""
    bits = x.to(tl.uint32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0).to(tl.uint16)
