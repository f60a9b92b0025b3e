"""Device functions that decode stored formats inside a kernel: E2M1 nibbles, E4M3 and E8M0 bytes.

Exponent and mantissa bits are moved to their places in a wider float, which gives the value times a power of two
(subnormals included, because a shorter exponent's subnormals are one of the longer one's binades); the power is undone
by the scale that must be multiplied in anyway.
"""

import triton
import triton.language as tl

E2M1_GAIN = tl.constexpr(16384.0)  # 2**14: what `e2m1` leaves to be multiplied in
E4M3_GAIN = tl.constexpr(256.0)  # 2**8: what `e4m3` leaves to be multiplied in


@triton.jit
def e2m1(code):
    """The low 4 bits of uint16 as float16, times 2**-14."""
    return (((code & 8) << 12) | ((code & 7) << 9)).to(tl.float16, bitcast=True)


@triton.jit
def e4m3(byte):
    """uint8 as float16, times 2**-8. The two codes that are no number become 480 and -480."""
    code = byte.to(tl.uint16)
    return (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def e8m0(byte):
    """uint8 as the float32 2**(byte - 127), byte below 255."""
    code = byte.to(tl.uint32)
    return tl.where(code == 0, 0x00400000, code << 23).to(tl.float32, bitcast=True)
