"""Device functions that decode stored formats inside a kernel: E2M1 nibbles, E4M3 and E8M0 bytes.

Integers work on both 16-bit halves of a word at once. Exponent and mantissa bits are moved to their places in a wider
float, which gives the value times a power of two (subnormals too: a shorter exponent's are the longer one's small
numbers), and a gain undoes that along with the scale. No chip needs the types themselves: Triton has E4M3 from sm_89.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl


@triton.jit
def _shifted(word, left: tl.constexpr):
    if left >= 0:
        return word << left
    else:
        return word >> -left


@triton.jit
def _halves(bits, gain, dtype: tl.constexpr):
    """The two 16-bit floats of a word (bfloat16 for that dtype, else float16), times gain, as dtype."""
    low, high = (bits & 0xFFFF).to(tl.uint16), (bits >> 16).to(tl.uint16)
    if dtype == tl.bfloat16:
        return low.to(tl.bfloat16, bitcast=True) * gain, high.to(tl.bfloat16, bitcast=True) * gain
    else:
        low = low.to(tl.float16, bitcast=True).to(tl.float32) * gain
        high = high.to(tl.float16, bitcast=True).to(tl.float32) * gain
        return low.to(dtype), high.to(dtype)


@triton.jit
def e2m1_pair(word, gain, nibble: tl.constexpr, dtype: tl.constexpr):
    """Codes `nibble` and `nibble` + 4 (of 0 .. 7, lowest bits first) of uint32 words, times `e2m1_gain`."""
    sign = (word << (12 - 4 * nibble)) & 0x80008000
    if dtype == tl.bfloat16:
        return _halves((_shifted(word, 6 - 4 * nibble) & 0x01C001C0) | sign, gain, dtype)
    else:
        return _halves((_shifted(word, 9 - 4 * nibble) & 0x0E000E00) | sign, gain, dtype)


@triton.jit
def e2m1_gain(scale, dtype: tl.constexpr):
    """What to multiply codes by, from their E8M0 byte: for bfloat16 at most 128 (a scale of 2)."""
    if dtype == tl.bfloat16:
        return ((scale.to(tl.uint16) + 126) << 7).to(tl.bfloat16, bitcast=True)
    else:
        return e8m0(scale) * 16384.0


@triton.jit
def e4m3_pair(word, byte: tl.constexpr, dtype: tl.constexpr):
    """Codes `byte` and `byte` + 2 (of 0 .. 3) of uint32 words, as dtype. The two that are no number become +-480."""
    sign = (word << (8 - 8 * byte)) & 0x80008000
    if dtype == tl.bfloat16:
        gain = tl.full([1, 1], 0x7B80, tl.uint16).to(tl.bfloat16, bitcast=True)  # 2**120
        return _halves((_shifted(word, 4 - 8 * byte) & 0x07F007F0) | sign, gain, dtype)
    else:
        return _halves((_shifted(word, 7 - 8 * byte) & 0x3F803F80) | sign, 256.0, dtype)


@triton.jit
def e4m3(byte, gain, dtype: tl.constexpr):
    """Codes (uint8), times `e4m3_gain`, as dtype. The two that are no number become +-480."""
    sign, code = (byte & 0x80).to(tl.uint16) << 8, (byte & 0x7F).to(tl.uint16)
    if dtype == tl.bfloat16:
        return (sign | (code << 4)).to(tl.bfloat16, bitcast=True) * gain
    else:
        return ((sign | (code << 7)).to(tl.float16, bitcast=True).to(tl.float32) * gain).to(dtype)


@triton.jit
def e4m3_gain(scale, dtype: tl.constexpr):
    """What to multiply codes by, from their E8M0 byte: for bfloat16 at most 2**127 (a scale of 128)."""
    if dtype == tl.bfloat16:
        return ((tl.minimum(scale, 134).to(tl.uint16) + 120) << 7).to(tl.bfloat16, bitcast=True)
    else:
        return e8m0(scale) * 256.0


@triton.jit
def e8m0(byte):
    """uint8 as the float32 2**(byte - 127), byte below 255."""
    code = byte.to(tl.uint32)
    return tl.where(code == 0, 0x00400000, code << 23).to(tl.float32, bitcast=True)
