"""RMS norm, rotation and FP8 rows as Triton kernels, against the references in float64 and DeepSeek's rules."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressed_spec.kernels import norm, rope
from compressed_spec.kernels.fp8_rows import decode_rows, encode_rows, row_bytes
from compressed_spec.kernels.norm_rope_triton import apply_rope, norm_rope, rms_norm
from compressed_spec.testing.exactness import assert_as_exact_as

# Triton's interpreter rounds to bfloat16 by cutting off, so bfloat16 is left to a GPU.
DTYPES = [torch.float32, torch.float16]
EPS = 1e-6


def norm_then_rope(
    x_THD: torch.Tensor, weight_D: torch.Tensor | None, cos_TP: torch.Tensor, sin_TP: torch.Tensor
) -> torch.Tensor:
    return rope.apply_rope(norm.rms_norm(x_THD, weight_D, EPS), cos_TP, sin_TP)


@settings(max_examples=15, deadline=None)
@given(
    shape=st.sampled_from([(1, 1, 8), (3, 5, 24), (2, 7, 40), (4, 1, 600), (0, 3, 16)]),
    num_rotated=st.sampled_from([2, 8]),
    weighted=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_equal_the_references(
    device: torch.device, shape: tuple[int, int, int], num_rotated: int, weighted: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    x_THD = torch.randn(shape, dtype=dtype)
    weight_D = torch.randn(shape[-1]) if weighted else None
    angle_TP = torch.randn(shape[0], num_rotated // 2) * 100
    cos_TP, sin_TP = angle_TP.cos(), angle_TP.sin()
    wide = (x_THD.double(), None if weight_D is None else weight_D.double(), cos_TP.double(), sin_TP.double())
    x, weight = x_THD.to(device), None if weight_D is None else weight_D.to(device)
    cos, sin = cos_TP.to(device), sin_TP.to(device)

    plain, exact = norm.rms_norm(x_THD, weight_D, EPS), norm.rms_norm(*wide[:2], EPS)
    assert_as_exact_as(rms_norm(x, weight, EPS).cpu(), plain, exact)
    plain, exact = rope.apply_rope(x_THD, cos_TP, sin_TP), rope.apply_rope(wide[0], *wide[2:])
    rotated = apply_rope(x, cos, sin).cpu()
    assert_as_exact_as(rotated, plain, exact)
    assert torch.equal(rotated[..., :-num_rotated], x_THD[..., :-num_rotated])
    plain, exact = norm_then_rope(x_THD, weight_D, cos_TP, sin_TP), norm_then_rope(*wide)
    assert_as_exact_as(norm_rope(x, weight, EPS, cos, sin).cpu(), plain, exact)


def test_heads_need_not_lie_together(device: torch.device) -> None:
    x = torch.randn(3, 40, dtype=torch.float16)[:, 4:36].unflatten(1, (2, 16)).to(device)
    angle = torch.randn(3, 4, device=device)
    expected = norm_rope(x.contiguous(), None, EPS, angle.cos(), angle.sin())
    assert torch.equal(norm_rope(x, None, EPS, angle.cos(), angle.sin()), expected)


def test_writes_its_rows_and_no_others(device: torch.device) -> None:
    pool = torch.full((9, 24), float("nan"), dtype=torch.float16, device=device)
    x, angle = torch.randn(4, 1, 24, dtype=torch.float16, device=device), torch.randn(4, 4, device=device)
    norm_rope(x, None, EPS, angle.cos(), angle.sin(), out_NX=pool[2:6])
    assert torch.equal(pool[2:6], norm_rope(x, None, EPS, angle.cos(), angle.sin()).squeeze(1))
    assert pool[:2].isnan().all()
    assert pool[6:].isnan().all()


@pytest.mark.parametrize(("width", "num_rotated"), [(72, 8), (136, 8), (256, 64)])
def test_fp8_rows_equal_those_of_torch(width: int, num_rotated: int, device: torch.device) -> None:
    """Bit for bit: subnormal codes, zeros, groups whose peak is a power of two times 448, and the largest code."""
    x = (torch.randn(7, 1, width) * torch.logspace(-6, 3, width)).bfloat16()
    x[2], x[3], x[4] = 0, 448.0, -(2.0**-9) * torch.arange(width)
    pairs = (7, num_rotated // 2)
    out = torch.full((7, row_bytes(width, num_rotated)), 77, dtype=torch.uint8, device=device)
    one, zero = torch.ones(pairs, device=device), torch.zeros(pairs, device=device)
    apply_rope(x.to(device), one, zero, out_NX=out)
    assert torch.equal(out.cpu(), encode_rows(x.squeeze(1), num_rotated))


def test_fp8_rows_keep_nan(device: torch.device) -> None:
    x, angle = torch.zeros(1, 1, 72, dtype=torch.bfloat16, device=device), torch.zeros(1, 4, device=device)
    x[0, 0, 5] = float("nan")
    out = torch.empty((1, row_bytes(72, 8)), dtype=torch.uint8, device=device)
    apply_rope(x, angle.cos(), angle.sin(), out_NX=out)
    assert decode_rows(out.cpu(), 72, 8).isnan().nonzero().tolist() == [[0, 5]]


def test_fp8_rows_are_what_simulated_quantisation_leaves() -> None:
    """An oracle of its own: the scale by logarithm, a code as the nearest of all 256."""
    x = (torch.randn(6, 80) * torch.logspace(-6, 4, 80)).bfloat16().float()
    decoded = decode_rows(encode_rows(x, 16), 80, 16)
    assert torch.equal(decoded[:, 64:], x[:, 64:])
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    every = every[every.isfinite()]
    peak = x[:, :64].double().abs().amax(1, keepdim=True).clamp(min=1e-4)
    scale = 2.0 ** torch.ceil(torch.log2(peak / 448))
    error = (x[:, :64].double() / scale).unsqueeze(-1) - every
    assert torch.equal((decoded[:, :64].double() / scale - x[:, :64].double() / scale).abs(), error.abs().amin(-1))


def test_fp8_rows_of_broken_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 64"):
        encode_rows(torch.zeros(1, 72), 16)
