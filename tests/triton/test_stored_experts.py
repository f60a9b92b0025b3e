"""Grouped products over stored experts: the reference against decoded ones, the kernels against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressed_spec.kernels import expert_tiles, expert_tiles_triton, stored_experts_triton
from compressed_spec.kernels.dequantize import dequantize_fp4, dequantize_fp8
from compressed_spec.kernels.moe import Routing, routed_experts
from compressed_spec.kernels.numerics import numerics_named
from compressed_spec.kernels.stored_experts import StoredExperts, stored_experts
from compressed_spec.testing.exactness import assert_as_exact_as

LIMIT = 2.0  # low enough that both clamps are met


def packed_experts(num: int, width: int, inner: int, scales: tuple[int, int] = (119, 124)) -> StoredExperts:
    """Random codes; E8M0 bytes drawn from a range."""

    def codes(*shape: int) -> torch.Tensor:
        return torch.randint(-128, 128, shape, dtype=torch.int8)

    def scale(*shape: int) -> torch.Tensor:
        return torch.randint(*scales, shape, dtype=torch.uint8).view(torch.float8_e8m0fnu)

    return StoredExperts(
        w13=codes(num, 2 * inner, width // 2),
        w13_scale=scale(num, 2 * inner, width // 32),
        w2=codes(num, width, inner // 2),
        w2_scale=scale(num, width, inner // 32),
    )


def fp8_experts(num: int, width: int, inner: int, block: tuple[int, int], scale_dtype: torch.dtype) -> StoredExperts:
    """Random codes, subnormal ones among them, and a scale a block; those of gate and of up begin anew."""

    def codes(*shape: int) -> torch.Tensor:
        magnitude = torch.randint(0, 0x7F, shape, dtype=torch.uint8)
        return (magnitude | torch.randint(0, 2, shape, dtype=torch.uint8) << 7).view(torch.float8_e4m3fn)

    def scale(halves: int, rows: int, cols: int) -> torch.Tensor:
        grid = (num, halves * -(-rows // block[0]), -(-cols // block[1]))
        if scale_dtype == torch.float32:
            return torch.rand(grid) * 1e-3
        return torch.randint(113, 119, grid, dtype=torch.uint8).view(scale_dtype)

    return StoredExperts(
        w13=codes(num, 2 * inner, width),
        w13_scale=scale(2, inner, width),
        w2=codes(num, width, inner),
        w2_scale=scale(1, width, inner),
        block=block,
    )


def plain_experts(num: int, width: int, inner: int, dtype: torch.dtype) -> StoredExperts:
    w13, w2 = torch.randn(num, 2 * inner, width) * 0.1, torch.randn(num, width, inner) * 0.1
    return StoredExperts(w13=w13.to(dtype), w13_scale=None, w2=w2.to(dtype), w2_scale=None)


def routing(num_nodes: int, num_experts: int, num_chosen: int) -> Routing:
    """Different experts a node, of which the last is nobody's where that can be."""
    usable = max(num_experts - 1, num_chosen)
    experts_TK = torch.stack([torch.randperm(usable)[:num_chosen] for _ in range(num_nodes)])
    return Routing(experts_TK=experts_TK, weights_TK=torch.rand(num_nodes, num_chosen))


def in_double(chosen: Routing) -> Routing:
    return Routing(experts_TK=chosen.experts_TK, weights_TK=chosen.weights_TK.double())


def test_reference_is_the_sum_of_decoded_experts() -> None:
    experts, chosen = packed_experts(5, 64, 32), in_double(routing(9, 5, 3))
    x_TD = torch.randn(9, 64, dtype=torch.float64)
    assert experts.w13_scale is not None
    assert experts.w2_scale is not None
    w13 = torch.stack([dequantize_fp4(w, s) for w, s in zip(experts.w13, experts.w13_scale, strict=True)]).double()
    w2 = torch.stack([dequantize_fp4(w, s) for w, s in zip(experts.w2, experts.w2_scale, strict=True)]).double()
    expected = routed_experts(x_TD, chosen, w13, w2, LIMIT, numerics_named("fast"))
    torch.testing.assert_close(stored_experts(x_TD, chosen, experts, LIMIT), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("nodes", "experts", "chosen", "width", "inner"),
    [
        (1, 3, 1, 32, 32),
        (7, 5, 3, 96, 160),  # widths that no tile divides
        (40, 2, 2, 64, 32),  # several tiles an expert
        (3, 16, 4, 64, 64),  # most experts idle
    ],
)
def test_kernels(dtype: torch.dtype, nodes: int, experts: int, chosen: int, width: int, inner: int) -> None:
    weights, picks = packed_experts(experts, width, inner), routing(nodes, experts, chosen)
    x_TD = torch.randn(nodes, width).to(dtype)
    actual = stored_experts_triton.stored_experts(x_TD, picks, weights, LIMIT)
    assert actual.dtype == torch.float32
    exact = stored_experts(x_TD.double(), in_double(picks), weights, LIMIT)
    assert_as_exact_as(actual.to(dtype), stored_experts(x_TD, picks, weights, LIMIT).to(dtype), exact)


@pytest.mark.parametrize(
    ("dtype", "scale_dtype"), [(torch.float32, torch.float8_e8m0fnu), (torch.float16, torch.float32)]
)
@pytest.mark.parametrize(
    ("nodes", "experts", "chosen", "width", "inner", "block"),
    [
        (1, 3, 1, 32, 36, (128, 128)),
        (5, 4, 2, 96, 132, (128, 64)),  # blocks end inside, those of gate before up
        (40, 2, 2, 64, 32, (16, 64)),
    ],
)
def test_fp8_kernels(
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    nodes: int,
    experts: int,
    chosen: int,
    width: int,
    inner: int,
    block: tuple[int, int],
) -> None:
    weights, picks = fp8_experts(experts, width, inner, block, scale_dtype), routing(nodes, experts, chosen)
    x_TD = (torch.randn(nodes, width) * 0.1).to(dtype)
    actual = stored_experts_triton.stored_experts(x_TD, picks, weights, LIMIT)
    exact = stored_experts(x_TD.double(), in_double(picks), weights, LIMIT)
    assert_as_exact_as(actual.to(dtype), stored_experts(x_TD, picks, weights, LIMIT).to(dtype), exact)


@pytest.mark.parametrize("scale_dtype", [torch.float8_e8m0fnu, torch.float32])
def test_fp8_reference_is_the_sum_of_decoded_experts(scale_dtype: torch.dtype) -> None:
    experts, chosen = fp8_experts(5, 64, 40, (16, 64), scale_dtype), in_double(routing(9, 5, 3))
    assert experts.w13_scale is not None
    assert experts.w2_scale is not None
    parts = [
        dequantize_fp8(codes, scale, (16, 64))
        for e in range(5)
        for codes, scale in zip(experts.w13[e].chunk(2), experts.w13_scale[e].chunk(2), strict=True)
    ]
    w2 = [dequantize_fp8(codes, scale, (16, 64)) for codes, scale in zip(experts.w2, experts.w2_scale, strict=True)]
    x_TD = torch.randn(9, 64, dtype=torch.float64)
    expected = routed_experts(
        x_TD,
        chosen,
        torch.cat(parts).view(5, 80, 64).double(),
        torch.stack(w2).double(),
        LIMIT,
        numerics_named("fast"),
    )
    torch.testing.assert_close(stored_experts(x_TD, chosen, experts, LIMIT), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "stored"), [(torch.float32, torch.float32), (torch.float16, torch.float16)])
@pytest.mark.parametrize(("nodes", "experts", "chosen", "width", "inner"), [(7, 5, 3, 90, 33), (40, 2, 2, 64, 32)])
def test_unquantised_kernels(
    dtype: torch.dtype, stored: torch.dtype, nodes: int, experts: int, chosen: int, width: int, inner: int
) -> None:
    weights, picks = plain_experts(experts, width, inner, stored), routing(nodes, experts, chosen)
    x_TD = torch.randn(nodes, width).to(dtype)
    actual = stored_experts_triton.stored_experts(x_TD, picks, weights, LIMIT)
    exact = stored_experts(x_TD.double(), in_double(picks), weights, LIMIT)
    assert_as_exact_as(actual.to(dtype), stored_experts(x_TD, picks, weights, LIMIT).to(dtype), exact)


def test_kernels_decode_every_code_and_far_apart_scales() -> None:
    weights, picks = packed_experts(2, 64, 64, (60, 190)), routing(3, 2, 1)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.int8)
    weights.w13.view(-1)[: 256 * 16] = codes.repeat(16)
    x_TD = torch.randn(3, 64) * 1e-3
    actual = stored_experts_triton.stored_experts(x_TD, picks, weights, LIMIT)
    exact = stored_experts(x_TD.double(), in_double(picks), weights, LIMIT)
    assert_as_exact_as(actual, stored_experts(x_TD, picks, weights, LIMIT), exact)


def test_kernels_read_only_what_is_theirs() -> None:
    """Experts that nobody chose hold scales that are no number, and x is a view into NaN."""
    weights, picks = packed_experts(4, 64, 32), routing(3, 4, 2)
    idle = [e for e in range(4) if e not in picks.experts_TK]
    for scale in (weights.w13_scale, weights.w2_scale):
        assert scale is not None
        scale.view(torch.uint8)[idle] = 255
    wide = torch.full((3, 128), float("nan"))
    wide[:, 32:96] = torch.randn(3, 64)
    actual = stored_experts_triton.stored_experts(wide[:, 32:96], picks, weights, LIMIT)
    exact = stored_experts(wide[:, 32:96].double(), in_double(picks), weights, LIMIT)
    assert_as_exact_as(actual, stored_experts(wide[:, 32:96], picks, weights, LIMIT), exact)


def test_a_node_has_the_same_bits_in_any_company() -> None:
    weights, picks = packed_experts(5, 64, 32), routing(9, 5, 2)
    x_TD = torch.randn(9, 64)
    together = stored_experts_triton.stored_experts(x_TD, picks, weights, LIMIT)
    alone = Routing(experts_TK=picks.experts_TK[4:5], weights_TK=picks.weights_TK[4:5])
    assert torch.equal(stored_experts_triton.stored_experts(x_TD[4:5], alone, weights, LIMIT)[0], together[4])


@settings(max_examples=25, deadline=None)
@given(
    experts=st.integers(1, 40).flatmap(
        lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), min_size=1, max_size=90))
    ),
    rows=st.sampled_from([16, 32]),
)
def test_tiles(experts: tuple[int, list[int]], rows: int) -> None:
    num_experts, chosen = experts
    experts_N = torch.tensor(chosen)
    tiles = expert_tiles_triton.expert_tiles(experts_N, num_experts, rows)
    assert tiles.order_N.tolist() == sorted(range(len(chosen)), key=lambda pair: (chosen[pair], pair))
    covered: list[int] = []
    for expert, first, end in zip(tiles.expert_M.tolist(), tiles.first_M.tolist(), tiles.end_M.tolist(), strict=True):
        if expert >= 0:
            assert first < end <= first + rows
            assert {chosen[pair] for pair in tiles.order_N[first:end].tolist()} == {expert}
            covered += range(first, end)
    assert covered == list(range(len(chosen)))
    reference = expert_tiles.expert_tiles(experts_N, num_experts, rows)
    for name in ("order_N", "expert_M"):
        assert torch.equal(getattr(tiles, name), getattr(reference, name))


def test_addresses_beyond_int32() -> None:
    """The last of so many experts that its first word is number 2**31: memory that nobody touches costs nothing."""
    num, picks = 2**23 + 1, torch.zeros(1, dtype=torch.int32)
    words = torch.empty((num, 64, 4), dtype=torch.uint32)
    scale = torch.empty((num, 64, 1), dtype=torch.uint8)
    small = packed_experts(1, 32, 32)
    assert small.w13_scale is not None
    words[-1], scale[-1] = small.w13[0].view(torch.uint32), small.w13_scale[0].view(torch.uint8)
    x_TD, weights_N = torch.randn(1, 32), torch.ones(1)
    tile = {"D": 32, "F": 32, "FORMAT": 0, "BLOCK_OUT": 1, "BLOCK_IN": 1, "ROWS": 16, "OUT": 32, "CHANNELS": 128}
    hidden = torch.empty(2, 1, 32)
    last = (words[-1:].clone(), scale[-1:].clone())
    for out, expert, weights in ((hidden[0], num - 1, (words, scale)), (hidden[1], 0, last)):
        lists = (torch.tensor([expert], dtype=torch.int32), picks, picks + 1)
        stored_experts_triton.gate_up_kernel[(1, 1)](
            x_TD, picks, weights_N, *lists, *weights, out, LIMIT, num_chosen=1, **tile
        )
    assert torch.equal(hidden[0], hidden[1])
    assert bool(hidden[0].any())
