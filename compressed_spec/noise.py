"""Counter-based randomness: every number is a pure function of (seed, stream, position, index).

Shape suffixes: N nodes, V vocabulary, K candidates.

Nothing here has state, so a number does not depend on what else was drawn, on the batch, on the device or on the
model's dtype. A 64-bit hash built from the splitmix64 finaliser (Steele, Lea and Flood 2014, with Stafford's
constants) is cut to 52 bits and centred in its cell, which puts uniforms strictly inside (0, 1) and makes them exact
in float64. The Gumbel noise needs two logarithms; they are written out in additions, multiplications and divisions,
which IEEE 754 rounds the same way everywhere, because library logarithms differ in the last place between devices,
and between a vector's body and tail.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: consecutive counters land far apart
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_UNIFORM_BITS = 52  # k + 1/2 with k < 2**52 is exact in float64; with one bit more, the last cell would round to 1
_SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
_LN2 = 0.6931471805599453
_ATANH_TERMS = 10  # |s| <= 3 - 2 sqrt(2), so the first term left out is below 3e-17 of the sum


class Stream(IntEnum):
    """What a number is for; numbers of different streams are independent."""

    GUMBEL = 0
    ACCEPT = 1
    RESIDUAL = 2
    DRAFT = 3
    REQUEST = 4


def request_seed(seed: int, index: int) -> int:
    """The seed of request `index` (from 0) of a call made with one int `seed`: a 64-bit hash of the pair.

    Distinct indices give distinct seeds, none of them `seed` itself but by chance. Any int is accepted; it counts
    modulo 2**64. Raises ValueError for a negative index.
    """
    if index < 0:
        raise ValueError(f"A request's index counts from 0, got {index}.")
    return _mix_int(_mix_int(seed + Stream.REQUEST * _GOLDEN) + (index + 1) * _GOLDEN)


def seed_tensor(seeds: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """int64 [N] from any ints: a seed counts modulo 2**64, so -1 and 2**64 - 1 are the same seed."""
    return torch.tensor([_signed(seed) for seed in seeds], dtype=torch.int64, device=device)


def uniforms(seed: int, stream: Stream, position: int) -> Iterator[float]:
    """The endless sequence of uniforms in (0, 1) that belongs to (seed, stream, position)."""
    key = _mix_int(_mix_int(seed + stream * _GOLDEN) + (position + 1) * _GOLDEN)
    index = 0
    while True:
        bits = _mix_int(key ^ _mix_int((index + 1) * _GOLDEN))
        yield ((bits >> (64 - _UNIFORM_BITS)) + 0.5) * 2.0**-_UNIFORM_BITS
        index += 1


def gumbel_noise(
    seeds_N: Tensor, positions_N: Tensor, vocab_size: int, device: torch.device | str | None = None
) -> Tensor:
    """Standard Gumbel noise, float64 [N, V], for the tokens sampled at `positions_N` by requests with `seeds_N`.

    `seeds_N` and `positions_N` are int64 [N] (`seed_tensor` makes the first from any ints); a position is the number
    of real tokens before the one being sampled, prompt included. Entry [n, v] is a pure function of (seed, position,
    v), to the bit.
    """
    device = seeds_N.device if device is None else torch.device(device)
    token_ids_V = torch.arange(vocab_size, dtype=torch.int64, device=device)
    return _gumbel(seeds_N.to(device), positions_N.to(device), token_ids_V[None, :])


def gumbel_noise_at(seeds_N: Tensor, positions_N: Tensor, token_ids_NK: Tensor) -> Tensor:
    """`gumbel_noise` at given token ids only, int64 [N, K]: float64 [N, K], equal to gathering it, to the bit."""
    device = token_ids_NK.device
    return _gumbel(seeds_N.to(device), positions_N.to(device), token_ids_NK)


def coupled_scores(log_q_NV: Tensor, g_NV: Tensor) -> Tensor:
    """A drafter's scores under coupled noise: log softmax of (log q + g) over the vocabulary, float64 [N, V].

    Ordering by the score is ordering by log q + g, that is sampling from q without replacement with the noise that
    the target will use. The score itself, not log q, estimates the chance of a match: the noise has already decided
    most of it.
    """
    return torch.log_softmax(log_q_NV.to(torch.float64) + g_NV, dim=-1)


def _gumbel(seeds_N: Tensor, positions_N: Tensor, token_ids_NK: Tensor) -> Tensor:
    golden = _signed(_GOLDEN)
    key_N = _mix(_mix(seeds_N + _signed(Stream.GUMBEL * _GOLDEN)) + (positions_N + 1) * golden)
    bits_NK = _mix(key_N[:, None] ^ _mix((token_ids_NK + 1) * golden))
    uniform_NK = _shift_right(bits_NK, 64 - _UNIFORM_BITS).to(torch.float64).add_(0.5).mul_(2.0**-_UNIFORM_BITS)
    return _log(_log(uniform_NK).neg_()).neg_()


def _mix(x: Tensor) -> Tensor:
    """splitmix64's finaliser on int64, whose products wrap: a bijection in which every input bit reaches every output
    bit.
    """
    x = (x ^ _shift_right(x, _SHIFTS[0])) * _signed(_MULTIPLIERS[0])
    x = (x ^ _shift_right(x, _SHIFTS[1])) * _signed(_MULTIPLIERS[1])
    return x ^ _shift_right(x, _SHIFTS[2])


def _mix_int(x: int) -> int:
    """`_mix` on a Python int, as an unsigned 64-bit number."""
    x &= _MASK
    x = ((x ^ (x >> _SHIFTS[0])) * _MULTIPLIERS[0]) & _MASK
    x = ((x ^ (x >> _SHIFTS[1])) * _MULTIPLIERS[1]) & _MASK
    return x ^ (x >> _SHIFTS[2])


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """A logical shift: torch's own fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """The int64 with the bits of x modulo 2**64."""
    return ((x + (1 << 63)) & _MASK) - (1 << 63)


def _log(x: Tensor) -> Tensor:
    """Natural logarithm of positive normal float64, to about one unit in the last place, bit-identical on every device.

    x = m * 2**e with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh(s) with s = (m - 1) / (m + 1), by its series in s**2.
    """
    bits = x.view(torch.int64)
    exponent = (bits - _SQRT_HALF_BITS) >> 52
    m = (bits - (exponent << 52)).view(torch.float64)
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    series = torch.full_like(z, 1.0 / (2 * _ATANH_TERMS - 1))
    for k in range(_ATANH_TERMS - 2, -1, -1):
        series.mul_(z).add_(1.0 / (2 * k + 1))
    return series.mul_(s).mul_(2.0).add_(exponent.to(torch.float64).mul_(_LN2))
