"""Device functions that multiply stored weights, as the rows of a product, with activations, as its columns.

A tile of weights is decoded in registers; the channels of x go into as many products as a word has columns.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import triton
import triton.language as tl

from compressed_spec.kernels.decode_triton import e2m1_gain, e2m1_pair, e4m3_pair, e8m0

FP4, FP8, PLAIN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _e2m1_dots(acc, word, gain, x, nibble: tl.constexpr):
    low, high = e2m1_pair(word, gain, nibble, x.dtype)
    x_low, x_high = tl.split(x)
    acc = tl.dot(low, tl.trans(x_low), acc, input_precision="ieee")
    return tl.dot(high, tl.trans(x_high), acc, input_precision="ieee")


@triton.jit
def e2m1_product(acc, word, scale, x):
    """acc [O, M] plus FP4 weights (words [O, C / 8], scale [O, C / 32]) times x [M, C]."""
    OUT: tl.constexpr = scale.shape[0]
    GROUPS: tl.constexpr = scale.shape[1]
    gain = e2m1_gain(scale, x.dtype)
    gain = tl.reshape(tl.broadcast_to(gain[:, :, None], [OUT, GROUPS, 4]), [OUT, GROUPS * 4])
    # Column 8 w + 4 h + n is nibble n of half h of word w.
    x_even, x_odd = tl.split(tl.reshape(x, [x.shape[0], GROUPS * 4, 2, 2, 2]))
    x_0, x_2 = tl.split(x_even)
    x_1, x_3 = tl.split(x_odd)
    # A sum of its own: with one that is carried through the loop, Triton 3.6 cannot compile this for sm_100.
    part = _e2m1_dots(tl.zeros_like(acc), word, gain, x_0, 0)
    part = _e2m1_dots(part, word, gain, x_1, 1)
    part = _e2m1_dots(part, word, gain, x_2, 2)
    return acc + _e2m1_dots(part, word, gain, x_3, 3)


@triton.jit
def _e4m3_dots(acc, word, x, byte: tl.constexpr):
    low, high = e4m3_pair(word, byte, x.dtype)
    x_low, x_high = tl.split(x)
    acc = tl.dot(low, tl.trans(x_low), acc, input_precision="ieee")
    return tl.dot(high, tl.trans(x_high), acc, input_precision="ieee")


@triton.jit
def e4m3_product(acc, word, scale, x):
    """acc [O, M] plus FP8 weights (words [O, C / 4], one scale a row, float32 or E8M0) times x [M, C]."""
    if scale.dtype == tl.uint8:
        scale = e8m0(scale)
    # Column 4 w + 2 h + b is byte b of half h of word w.
    x_even, x_odd = tl.split(tl.reshape(x, [x.shape[0], word.shape[1], 2, 2]))
    part = _e4m3_dots(tl.zeros_like(acc), word, x_even, 0)
    part = _e4m3_dots(part, word, x_odd, 1)
    return acc + part * scale[:, None]


@triton.jit
def product(
    acc,
    p_weights,
    p_scale,
    row,
    scale_row,
    there,
    start,
    x,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_IN: tl.constexpr,
):
    """acc [O, M] plus columns start .. of rows `row` of a matrix with K columns, times x [M, C].

    p_weights: words of FP4 or FP8 codes, or the numbers themselves. p_scale: one a row and 32 columns (FP4), or one a
    row `scale_row` of blocks and BLOCK_IN columns (FP8), which C divides.
    """
    CHANNELS: tl.constexpr = x.shape[1]
    if FORMAT == FP4:
        word, group = start // 8 + tl.arange(0, CHANNELS // 8), start // 32 + tl.arange(0, CHANNELS // 32)
        p_words, p_groups = p_weights + row[:, None] * (K // 8), p_scale + row[:, None] * (K // 32)
        b_words = tl.load(p_words + word[None, :], mask=there[:, None] & (word < K // 8)[None, :], other=0)
        b_scale = tl.load(p_groups + group[None, :], mask=there[:, None] & (group < K // 32)[None, :], other=0)
        return e2m1_product(acc, b_words, b_scale, x)
    elif FORMAT == FP8:
        word, blocks = start // 4 + tl.arange(0, CHANNELS // 4), (K + BLOCK_IN - 1) // BLOCK_IN
        p_words = p_weights + row[:, None] * (K // 4) + word[None, :]
        b_words = tl.load(p_words, mask=there[:, None] & (word < K // 4)[None, :], other=0)
        b_scale = tl.load(p_scale + scale_row * blocks + start // BLOCK_IN, mask=there, other=0)
        return e4m3_product(acc, b_words, b_scale, x)
    else:
        channel = start + tl.arange(0, CHANNELS)
        p_row = p_weights + row[:, None] * K + channel[None, :]
        b_weights = tl.load(p_row, mask=there[:, None] & (channel < K)[None, :], other=0.0)
        return tl.dot(b_weights.to(x.dtype), tl.trans(x), acc, input_precision="ieee")
