"""T22: block-scaled FP8 and packed FP4 against an implementation that knows only the bits."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from compressed_spec.kernels.dequantize import dequantize_fp4, dequantize_fp8
from compressed_spec.models.deepseek_v4.tiny_tensors import store_fp4, store_fp8

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def e4m3_value(code: int) -> float:
    """Sign, 4 bits of exponent with bias 7, 3 bits of mantissa; only 0x7f and 0xff are not numbers."""
    sign, exponent, mantissa = (-1.0 if code & 0x80 else 1.0), code >> 3 & 15, code & 7
    if code & 0x7F == 0x7F:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def e2m1_value(code: int) -> float:
    """Sign, 2 bits of exponent with bias 1, 1 bit of mantissa."""
    sign, exponent, mantissa = (-1.0 if code & 8 else 1.0), code >> 1 & 3, code & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def by_element_fp8(codes: Bytes, scale: Floats, block: tuple[int, int]) -> Floats:
    out = np.empty(codes.shape, np.float32)
    for o, i in np.ndindex(codes.shape):
        out[o, i] = np.float32(e4m3_value(int(codes[o, i]))) * scale[o // block[0], i // block[1]]
    return out


def by_element_fp4(packed: Bytes, scale: Floats) -> Floats:
    out = np.empty((packed.shape[0], packed.shape[1] * 2), np.float32)
    for o, i in np.ndindex(out.shape):
        byte = int(packed[o, i // 2])
        out[o, i] = np.float32(e2m1_value(byte & 15 if i % 2 == 0 else byte >> 4)) * scale[o, i // 32]
    return out


def assert_same_bits(ours: torch.Tensor, oracle: Floats) -> None:
    np.testing.assert_array_equal(ours.numpy().view(np.uint32), oracle.view(np.uint32))


def powers_of_two(bytes_: Bytes) -> Floats:
    return np.ldexp(np.float32(1), bytes_.astype(np.int32) - 127).astype(np.float32)


def e8m0(bytes_: Bytes) -> torch.Tensor:
    return torch.from_numpy(bytes_).view(torch.float8_e8m0fnu)


@pytest.mark.parametrize("block", [(128, 128), (32, 32), (16, 64)])
@pytest.mark.parametrize("shape", [(256, 128), (130, 70), (64, 200), (1, 1)])
@pytest.mark.parametrize("scales", ["e8m0", "f32"])
def test_T22_fp8_bit_equal(shape: tuple[int, int], block: tuple[int, int], scales: str) -> None:
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, shape).astype(np.uint8)
    codes[codes & 0x7F == 0x7F] = 0
    grid = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    if scales == "e8m0":
        stored = random.integers(100, 150, grid).astype(np.uint8)
        scale, scale_values = e8m0(stored), powers_of_two(stored)
    else:
        scale_values = random.lognormal(size=grid).astype(np.float32)
        scale = torch.from_numpy(scale_values)
    ours = dequantize_fp8(torch.from_numpy(codes).view(torch.float8_e4m3fn), scale, block)
    assert_same_bits(ours, by_element_fp8(codes, scale_values, block))


def test_T22_fp8_every_code_and_every_scale() -> None:
    codes = np.tile(np.array([c for c in range(256) if c & 0x7F != 0x7F], np.uint8), (255, 1))
    exponents = np.arange(255, dtype=np.uint8)[:, None]  # 2^-127 is subnormal, 255 is no number
    ours = dequantize_fp8(
        torch.from_numpy(codes).view(torch.float8_e4m3fn),
        torch.from_numpy(exponents).view(torch.float8_e8m0fnu),
        (1, 254),
    )
    with np.errstate(over="ignore"):
        values = np.array([e4m3_value(int(c)) for c in codes[0]], np.float32)
        assert_same_bits(ours, (values * powers_of_two(exponents)).astype(np.float32))


@pytest.mark.parametrize("shape", [(256, 16), (1, 48), (7, 64)])
def test_T22_fp4_bit_equal(shape: tuple[int, int]) -> None:
    random = np.random.default_rng(1)
    packed = random.integers(0, 256, shape).astype(np.uint8)
    if shape[0] == 256:
        packed[:, 0] = np.arange(256)  # every pair of codes
    stored = random.integers(0, 255, (shape[0], shape[1] // 16)).astype(np.uint8)
    ours = dequantize_fp4(
        torch.from_numpy(packed).view(torch.int8), torch.from_numpy(stored).view(torch.float8_e8m0fnu)
    )
    with np.errstate(over="ignore"):
        assert_same_bits(ours, by_element_fp4(packed, powers_of_two(stored)))


def test_T22_fp4_low_nibble_is_the_even_column() -> None:
    packed = torch.tensor([[0x21] + [0] * 15], dtype=torch.int8)
    scale = torch.ones(1, 1).to(torch.float8_e8m0fnu)
    assert dequantize_fp4(packed, scale)[0, :3].tolist() == [0.5, 1.0, 0.0]


def test_fp8_storage_round_trip() -> None:
    """Stored, read and stored again gives the same codes; each value is within half a step of E4M3."""
    weight = torch.randn(200, 150)
    codes, scale = store_fp8(weight, "e8m0")
    read = dequantize_fp8(codes, scale, (128, 128))
    again, scale_again = store_fp8(read, "e8m0")
    assert torch.equal(codes.view(torch.uint8), again.view(torch.uint8))
    assert torch.equal(scale.view(torch.uint8), scale_again.view(torch.uint8))
    full = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :150]
    assert ((read - weight).abs() <= torch.maximum(weight.abs() / 16, full * 2.0**-10)).all()


def test_fp4_storage_round_trip() -> None:
    """Each value goes to the nearest of E2M1's magnitudes."""
    weight = torch.randn(64, 96)
    packed, scale = store_fp4(weight)
    read = dequantize_fp4(packed, scale)
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    scaled = weight.abs() / scale.float().repeat_interleave(32, 1)
    nearest = (scaled[..., None] - magnitudes).abs().amin(-1) * scale.float().repeat_interleave(32, 1)
    torch.testing.assert_close((read - weight).abs(), nearest, rtol=0, atol=1e-6)
    assert (read.sign() * weight.sign() >= 0).all()
