"""Products with block-scaled FP8 weights: the kernel against the decoded product in float64."""

import pytest
import torch

from compressed_spec.kernels import fp8_linear_triton
from compressed_spec.kernels.fp8_linear import FP8Weight, fp8_grouped_linear, fp8_linear
from compressed_spec.testing.exactness import assert_as_exact_as


def stored(rows: int, cols: int, block: tuple[int, int], scales: torch.dtype) -> FP8Weight:
    """Random codes that are numbers, and scales."""
    codes = torch.randint(0, 256, (rows, cols), dtype=torch.uint8)
    codes[codes & 0x7F == 0x7F] = 0x01
    grid = (-(-rows // block[0]), -(-cols // block[1]))
    if scales == torch.float32:
        scale = torch.rand(grid) + 0.01
    else:
        scale = torch.randint(100, 130, grid, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return FP8Weight(codes=codes.view(torch.float8_e4m3fn), scale=scale, block=block)


def test_reference_decodes_and_multiplies() -> None:
    weight = stored(40, 72, (16, 64), torch.float8_e8m0fnu)
    x_TD = torch.randn(2, 3, 72, dtype=torch.float64)
    rows = weight.codes.double() * weight.scale.double().repeat_interleave(16, 0)[:40].repeat_interleave(64, 1)[:, :72]
    torch.testing.assert_close(fp8_linear(x_TD, weight), x_TD @ rows.T)
    by_group = torch.stack([x_TD[:, g, :] @ rows[g * 20 : g * 20 + 20].T for g in range(2)], dim=1)
    torch.testing.assert_close(fp8_grouped_linear(x_TD[:, :2], weight), by_group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("nodes", "rows", "cols", "block", "scales"),
    [
        (1, 1, 4, (128, 128), torch.float8_e8m0fnu),
        (3, 130, 200, (128, 128), torch.float8_e8m0fnu),
        (17, 70, 1000, (128, 128), torch.float32),  # columns split among programs
        (70, 200, 64, (128, 128), torch.float8_e8m0fnu),  # several tiles of rows
        (5, 33, 192, (32, 64), torch.float8_e8m0fnu),
    ],
)
def test_kernel(
    dtype: torch.dtype, nodes: int, rows: int, cols: int, block: tuple[int, int], scales: torch.dtype
) -> None:
    weight, x_TD = stored(rows, cols, block, scales), (torch.randn(nodes, cols) * 1e-3).to(dtype)
    actual = fp8_linear_triton.fp8_linear(x_TD, weight)
    assert actual.dtype == dtype
    assert_as_exact_as(actual, fp8_linear(x_TD, weight), fp8_linear(x_TD.double(), weight))


def test_kernel_takes_leading_axes_and_groups() -> None:
    weight, x_TGD = stored(3 * 70, 96, (128, 128), torch.float8_e8m0fnu), torch.randn(5, 3, 96)
    exact = fp8_grouped_linear(x_TGD.double(), weight)
    actual = fp8_linear_triton.fp8_grouped_linear(x_TGD, weight)
    assert_as_exact_as(actual, fp8_grouped_linear(x_TGD, weight), exact)
    actual = fp8_linear_triton.fp8_linear(x_TGD, weight)
    assert_as_exact_as(actual, fp8_linear(x_TGD, weight), fp8_linear(x_TGD.double(), weight))


def test_kernel_decodes_every_code() -> None:
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F] + [0, 0], dtype=torch.uint8)
    weight = FP8Weight(codes=codes[None].view(torch.float8_e4m3fn), scale=torch.ones(1, 2), block=(128, 128))
    actual = fp8_linear_triton.fp8_linear(torch.eye(256), weight)
    assert torch.equal(actual[:, 0], weight.codes[0].float())


def test_kernel_reads_nothing_beyond_its_rows() -> None:
    wide = torch.full((6, 200), float("nan"))
    wide[:4, 4:104] = torch.randn(4, 100)
    weight, x_TD = stored(20, 100, (128, 128), torch.float8_e8m0fnu), wide[:4, 4:104]
    actual = fp8_linear_triton.fp8_linear(x_TD, weight)
    assert_as_exact_as(actual, fp8_linear(x_TD, weight), fp8_linear(x_TD.double(), weight))
