"""Each operation on its own: a row has the same bits alone, at another place, with other neighbours, in any number.

R = rows, W = width
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from compressed_spec.kernels.compress import pool_windows
from compressed_spec.kernels.hyper_connection import collapse, expand, head_weights, mix_weights, sinkhorn
from compressed_spec.kernels.moe import Routing, route, routed_experts, router_scores, swiglu
from compressed_spec.kernels.norm import rms_norm
from compressed_spec.kernels.numerics import numerics_named
from compressed_spec.kernels.rope import apply_rope
from compressed_spec.testing import assert_same_bits

Rows = tuple[torch.Tensor, ...]
Operation = Callable[..., torch.Tensor]

INVARIANT = numerics_named("invariant")
COUNTS = (1, 2, 3, 5, 7, 8, 9, 12, 16, 17, 31)
WIDTHS = (1, 3, 7, 16, 17, 33, 100)
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
WIDE = [torch.float32, torch.float64]
NUM_ROWS = 75

pytestmark = pytest.mark.usefixtures("threads")
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
wide = pytest.mark.parametrize("dtype", WIDE, ids=str)
widths = pytest.mark.parametrize("width", WIDTHS)


def random_rows(*shape: int, dtype: torch.dtype, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(NUM_ROWS, *shape, generator=generator, dtype=torch.float64).mul(scale).to(dtype)


def weight(*shape: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).div(shape[-1] ** 0.5).to(dtype)


def check(operation: Operation, *rows: torch.Tensor) -> None:
    """Fail unless each output row of `operation` is a function of the same row of every input alone."""
    expected = operation(*rows)
    assert expected.shape[0] == NUM_ROWS
    for count in COUNTS:
        for first in (0, 1, 5, NUM_ROWS - count):
            part = operation(*(x[first : first + count].clone() for x in rows))
            assert_same_bits(part, expected[first : first + count], f"rows {first} .. {first + count}")
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(2))
    assert_same_bits(operation(*(x[order] for x in rows)), expected[order], "shuffled rows")
    other = torch.arange(NUM_ROWS) % 3 != 1
    if rows[0].is_floating_point():
        poisoned = (torch.full_like(rows[0], float("nan")).where(_column(other, rows[0]), rows[0]), *rows[1:])
        assert_same_bits(operation(*poisoned)[~other], expected[~other], "rows beside NaN")


def _column(rows_R: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return rows_R.view(-1, *[1] * (like.dim() - 1))


@pytest.mark.parametrize(
    "operation",
    [lambda x: x / len(x), lambda x: x - x.mean(0), lambda x: x + _column(torch.arange(len(x)), x)],
    ids=["count", "neighbours", "place"],
)
def test_check_finds(operation: Operation) -> None:
    with pytest.raises(AssertionError, match="differ"):
        check(operation, random_rows(7, dtype=torch.float32))


def test_torch_itself_is_not_invariant() -> None:
    """Were all of these invariant here, nothing in this file would show that it can fail."""
    matrix = weight(64, 300, dtype=torch.float32)
    found = []
    for operation in (torch.sigmoid, F.silu, F.softplus, lambda x: F.linear(x, matrix)):
        try:
            check(operation, random_rows(300, dtype=torch.float32))
        except AssertionError:
            found.append(operation)
    assert found


SHAPES = [
    (24, 1024),
    (48, 32),
    (17, 33),
    (64, 256),
    (256, 256),
    (512, 1024),
    (1000, 300),
    (96, 2048),
    (4, 4096),
    (16, 7),
]


@dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear(shape: tuple[int, int], dtype: torch.dtype) -> None:
    matrix = weight(*shape, dtype=dtype)
    check(lambda x: INVARIANT.linear(x, matrix), random_rows(shape[1], dtype=dtype))


@dtypes
def test_linear_of_streams(dtype: torch.dtype) -> None:
    matrix = weight(40, 36, dtype=dtype)
    check(lambda x: INVARIANT.linear(x, matrix), random_rows(3, 36, dtype=dtype))


@dtypes
@pytest.mark.parametrize("shape", [(2, 8, 32), (4, 64, 128), (3, 7, 33)], ids=str)
def test_grouped_linear(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    matrices = weight(*shape, dtype=dtype)
    check(lambda x: INVARIANT.grouped_linear(x, matrices), random_rows(shape[0], shape[2], dtype=dtype))


@dtypes
@pytest.mark.parametrize("shape", [(4, 4, 256), (4, 4, 33), (8, 64, 64), (3, 17, 5)], ids=str)
def test_bmm(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, y, z = shape
    check(INVARIANT.bmm, random_rows(x, y, dtype=dtype), random_rows(y, z, dtype=dtype, seed=3))


@widths
@wide
@pytest.mark.parametrize("name", ["sigmoid", "silu", "softplus"])
def test_activation(name: str, width: int, dtype: torch.dtype) -> None:
    check(getattr(INVARIANT, name), random_rows(width, dtype=dtype))


@widths
@dtypes
def test_swiglu(width: int, dtype: torch.dtype) -> None:
    check(
        lambda gate, up: swiglu(gate, up, 1.0, INVARIANT),
        random_rows(width, dtype=dtype),
        random_rows(width, dtype=dtype, seed=3),
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["sigmoid", "silu", "softplus"])
def test_activation_is_the_function_it_names(name: str, dtype: torch.dtype) -> None:
    """Against torch in float64, far into both tails: within 4 units in the last place, and of the smallest normal."""
    x = torch.cat((torch.linspace(-120, 120, 4001), torch.linspace(-1e-3, 1e-3, 501))).to(dtype)
    actual = getattr(INVARIANT, name)(x)
    expected = getattr(torch if name == "sigmoid" else F, name)(x.double())
    limits = torch.finfo(dtype)
    assert actual.dtype == dtype
    assert bool(((actual.double() - expected).abs() <= 4 * limits.eps * expected.abs() + 200 * limits.tiny).all())


@dtypes
@pytest.mark.parametrize("width", [*WIDTHS, 1024, 4100])
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    scale = weight(width, dtype=torch.promote_types(dtype, torch.float32))
    check(lambda x: rms_norm(x, scale, 1e-6), random_rows(width, dtype=dtype))
    check(lambda x: rms_norm(x, None, 1e-6), random_rows(3, width, dtype=dtype))


@wide
@pytest.mark.parametrize("num_streams", [1, 3, 4, 5])
def test_sinkhorn(num_streams: int, dtype: torch.dtype) -> None:
    check(lambda x: sinkhorn(x, 20, 1e-6), random_rows(num_streams, num_streams, dtype=dtype))


@dtypes
@pytest.mark.parametrize("width", [7, 32, 33, 256])
def test_hyper_connection(width: int, dtype: torch.dtype) -> None:
    """A whole site: mixing weights, collapse, expansion; and the head's collapse."""
    wider = torch.promote_types(dtype, torch.float32)
    fn, base, scale = weight(24, 4 * width, dtype=wider), weight(24, dtype=wider), weight(3, dtype=wider)

    def site(streams_RMD: torch.Tensor, output_RD: torch.Tensor) -> torch.Tensor:
        mix = mix_weights(streams_RMD, fn, scale, base, iterations=20, eps=1e-6, norm_eps=1e-6, numerics=INVARIANT)
        block_input = collapse(streams_RMD, mix.pre_TM).unsqueeze(1)
        return torch.cat((expand(output_RD, streams_RMD, mix, INVARIANT), block_input), dim=1)

    def head(streams_RMD: torch.Tensor) -> torch.Tensor:
        weights_RM = head_weights(streams_RMD, fn[:4], scale[:1], base[:4], eps=1e-6, norm_eps=1e-6, numerics=INVARIANT)
        return collapse(streams_RMD, weights_RM)

    check(site, random_rows(4, width, dtype=dtype), random_rows(width, dtype=dtype, seed=3))
    check(head, random_rows(4, width, dtype=dtype))
    check(lambda streams_RMD: streams_RMD.mean(dim=1), random_rows(4, width, dtype=dtype))  # what DSpark reads


@wide
@pytest.mark.parametrize("pairs", [1, 2, 8, 31, 32])
def test_rope(pairs: int, dtype: torch.dtype) -> None:
    """The angles from positions as well as the rotation."""
    frequencies_P = weight(pairs, dtype=dtype).abs()
    x = random_rows(3, 2 * pairs + 5, dtype=dtype)

    def rotated(position_R: torch.Tensor, x_RHD: torch.Tensor) -> torch.Tensor:
        angles = position_R.to(dtype).unsqueeze(-1) * frequencies_P
        return apply_rope(x_RHD, angles.cos(), angles.sin())

    check(rotated, torch.arange(NUM_ROWS) * 977, x)


@wide
@pytest.mark.parametrize("width", [7, 16, 33, 64, 128])
@pytest.mark.parametrize(("span", "overlap"), [(8, True), (8, False), (128, False)])
def test_pool_windows(span: int, overlap: bool, width: int, dtype: torch.dtype) -> None:
    """Windows of any rows, some of which are not there; rows that no window lists hold NaN."""
    row = 2 * width * (2 if overlap else 1)
    buffer_RD = torch.cat((random_rows(row, dtype=dtype), torch.full((1, row), float("nan"), dtype=dtype)))
    rows = torch.randint(0, NUM_ROWS, (NUM_ROWS, span), generator=torch.Generator().manual_seed(5))
    rows[::4, : span // 2] = -1
    check(lambda rows_CK: pool_windows(buffer_RD, rows_CK, overlap=overlap), rows)


@dtypes
@pytest.mark.parametrize("num_experts", [4, 33])
@pytest.mark.parametrize(("width", "inner", "num_chosen"), [(32, 16, 2), (33, 17, 3), (256, 128, 4)])
def test_mixture_of_experts(width: int, inner: int, num_chosen: int, num_experts: int, dtype: torch.dtype) -> None:
    """Routing and experts; with 4 experts the neighbours crowd into the same tiles, with 33 most are alone."""
    wider = torch.promote_types(dtype, torch.float32)
    gate, bias = weight(num_experts, width, dtype=wider), weight(num_experts, dtype=wider)
    w13, w2 = weight(num_experts, 2 * inner, width, dtype=dtype), weight(num_experts, width, inner, dtype=dtype)

    def experts(x_RD: torch.Tensor) -> torch.Tensor:
        scores = router_scores(x_RD, gate, INVARIANT)
        routing: Routing = route(scores, (scores + bias).topk(num_chosen, dim=-1).indices, 1.5)
        return routed_experts(x_RD, routing, w13, w2, 10.0, INVARIANT)

    check(experts, random_rows(width, dtype=dtype))
