"""Counter-based noise: a pure function of (seed, stream, position, token), uniform, and independent along every axis.

Shape suffixes: N nodes, V vocabulary. All inputs are fixed, so no statistical test here can fail by chance.
"""

import itertools
import math
from decimal import Decimal, localcontext

import pytest
import torch
from torch import Tensor

from compressed_spec.noise import (
    Stream,
    _log,
    coupled_scores,
    gumbel_noise,
    gumbel_noise_at,
    request_seed,
    seed_tensor,
    uniforms,
)

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
SEEDS = [0, 1, 2, -1, 12345, 2**63 - 1, -(2**63), 2**64 + 7, 10**30]


def uniform_of(g: Tensor) -> Tensor:
    return torch.exp(-torch.exp(-g))


def noise(seeds: list[int], positions: list[int], vocab_size: int) -> Tensor:
    return gumbel_noise(seed_tensor(seeds), torch.tensor(positions), vocab_size)


def chi_square(counts: Tensor) -> float:
    """Standard deviations by which chi-square against equal counts exceeds its mean."""
    expected = counts.sum() / counts.numel()
    degrees = counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - degrees) / math.sqrt(2 * degrees))


def assert_uniform_pair(u: Tensor, v: Tensor) -> None:
    """(u, v) fills the unit square evenly."""
    cells = (u * 16).long() * 16 + (v * 16).long()
    assert abs(chi_square(torch.bincount(cells.flatten(), minlength=256).double())) < 4


def test_noise_matches_the_written_definition() -> None:
    """Against whole numbers in Python and 40-digit logarithms."""

    def mix(x: int) -> int:
        x %= 2**64
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
        return x ^ (x >> 31)

    golden = 0x9E3779B97F4A7C15
    for seed, position in itertools.product(SEEDS, [0, 1, 1_000_000]):
        g_V = noise([seed], [position], 9)[0]
        numbers = uniforms(seed, Stream.GUMBEL, position)
        for token in range(9):
            bits = mix(mix(mix(seed) + (position + 1) * golden) ^ mix((token + 1) * golden)) >> 12
            assert next(numbers) == (bits + 0.5) * 2.0**-52
            with localcontext(prec=40):
                exact = float(-(-((bits + Decimal("0.5")) / 2**52).ln()).ln())
            assert float(g_V[token]) == pytest.approx(exact, rel=1e-14, abs=1e-14)


def test_T28_noise_does_not_depend_on_batch_layout_or_vocabulary() -> None:
    """To the bit: alone, in a batch, in part, permuted, gathered, for fewer tokens, on another device."""
    positions = list(range(len(SEEDS)))
    g_NV = noise(SEEDS, positions, 1003)
    for device in DEVICES:
        assert torch.equal(gumbel_noise(seed_tensor(SEEDS), torch.tensor(positions), 1003, device).cpu(), g_NV)
    for n, seed in enumerate(SEEDS):
        assert torch.equal(noise([seed], [n], 1003)[0], g_NV[n])
    assert torch.equal(noise(SEEDS, positions, 17), g_NV[:, :17])
    order = torch.randperm(1003)[:5]
    at = gumbel_noise_at(seed_tensor(SEEDS), torch.tensor(positions), order.expand(len(SEEDS), 5))
    assert torch.equal(at, g_NV[:, order])
    strided = gumbel_noise_at(seed_tensor(SEEDS), torch.tensor(positions), torch.arange(1002).view(501, 2).t()[:1])
    assert torch.equal(strided, g_NV[:, 0:1002:2])


def test_T28_every_int_is_a_seed_modulo_2_to_the_64() -> None:
    assert torch.equal(noise([-1], [3], 8), noise([2**64 - 1], [3], 8))
    assert torch.equal(noise([5], [3], 8), noise([5 + 2**64], [3], 8))
    others = [noise([seed], [3], 8) for seed in SEEDS]
    for a, b in itertools.combinations(others, 2):
        assert not torch.equal(a, b)


def test_T26_uniforms_lie_strictly_inside_and_noise_is_finite() -> None:
    """At both ends of the 52-bit grid, and as drawn."""
    ends = torch.tensor([0.5 * 2.0**-52, 1 - 0.5 * 2.0**-52], dtype=torch.float64)
    assert ends[0] > 0
    assert ends[1] < 1
    g = -_log(-_log(ends))
    assert g.tolist() == pytest.approx([-math.log(53 * math.log(2)), 53 * math.log(2)], rel=1e-15)
    u = torch.tensor(list(itertools.islice(uniforms(0, Stream.ACCEPT, 0), 10_000)), dtype=torch.float64)
    assert 0 < u.min() < 1e-3
    assert 1 - 1e-3 < u.max() < 1


def test_uniformity_along_tokens_positions_and_seeds() -> None:
    count = 100_000
    by_token = noise([7], [11], count)[0]
    by_position = gumbel_noise_at(seed_tensor([7]), torch.arange(count), torch.full((count, 1), 3))[:, 0]
    by_seed = gumbel_noise_at(torch.arange(count), torch.tensor([11]), torch.full((count, 1), 3))[:, 0]
    spread_seeds = torch.arange(count) << 40
    by_high_seed = gumbel_noise_at(spread_seeds, torch.tensor([11]), torch.full((count, 1), 3))[:, 0]
    for g in (by_token, by_position, by_seed, by_high_seed):
        u = uniform_of(g)
        assert abs(chi_square(torch.bincount((u * 256).long(), minlength=256).double())) < 4
        assert_uniform_pair(u[:-1], u[1:])
        low = (u * 2.0**30).long() % 256  # low bits too, not the leading ones alone
        assert abs(chi_square(torch.bincount(low, minlength=256).double())) < 4


def test_rows_of_neighbouring_positions_and_seeds_are_independent() -> None:
    g_NV = noise([0, 0, 1, -1, 0], [0, 1, 0, 0, 2], 60_000)
    for a, b in itertools.combinations(range(5), 2):
        u, v = uniform_of(g_NV[a]), uniform_of(g_NV[b])
        assert_uniform_pair(u, v)
        assert_uniform_pair(u[1:], v[:-1])  # nor is one the other shifted by a token
        assert abs(float(torch.corrcoef(torch.stack([u, v]))[0, 1])) < 4 / math.sqrt(60_000)


def test_streams_are_independent() -> None:
    draws = {s: torch.tensor(list(itertools.islice(uniforms(3, s, 5), 20_000)), dtype=torch.float64) for s in Stream}
    for a, b in itertools.combinations(Stream, 2):
        assert_uniform_pair(draws[a], draws[b])


def test_gumbel_argmax_samples_the_law() -> None:
    """Joint law of two neighbouring positions, 200 000 requests."""
    p_V = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64)
    seeds = torch.arange(200_000)
    first, second = (
        (gumbel_noise(seeds, torch.full_like(seeds, position), 4) + p_V.log()).argmax(-1) for position in (20, 21)
    )
    counts = torch.bincount(first * 4 + second, minlength=16).double()
    expected = torch.outer(p_V, p_V).flatten() * 200_000
    assert float(((counts - expected) ** 2 / expected).sum()) < 15 + 4 * math.sqrt(30)


def test_T28_request_seeds() -> None:
    """Each request of a call has its own seed, and no request has the call's or that of a neighbouring call."""
    seeds = [request_seed(seed, index) for seed in (0, 1, -1, 2**80 + 9) for index in range(1000)]
    assert len(set(seeds)) == len(seeds)
    assert 0 not in seeds
    assert request_seed(0, 0) == request_seed(2**64, 0)
    with pytest.raises(ValueError, match="counts from 0"):
        request_seed(0, -1)


def test_coupled_scores_rank_as_sampling_without_replacement() -> None:
    """Ordered pairs (first, second) have the law q(a) q(b) / (1 - q(a)); scores are normalised log probabilities."""
    q_V = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    seeds = torch.arange(100_000)
    scores_NV = coupled_scores(q_V.log().expand(100_000, 3), gumbel_noise(seeds, torch.full_like(seeds, 9), 3))
    assert torch.allclose(scores_NV.exp().sum(-1), torch.ones(100_000, dtype=torch.float64))
    top = scores_NV.topk(2, dim=-1).indices
    counts = torch.bincount(top[:, 0] * 3 + top[:, 1], minlength=9).double()
    chi = 0.0
    for a, b in itertools.permutations(range(3), 2):
        expected = float(q_V[a] * q_V[b] / (1 - q_V[a])) * 100_000
        chi += (float(counts[a * 3 + b]) - expected) ** 2 / expected
    assert chi < 5 + 4 * math.sqrt(10)
    excluded = coupled_scores(torch.tensor([[0.0, -math.inf]]), gumbel_noise(seeds[:1], seeds[:1], 2))
    assert excluded.tolist() == [[0.0, -math.inf]]
