"""Pooling of compressor windows as a Triton kernel, against the references in float64."""

import pytest
import torch

from compressed_spec.kernels import compress, compress_triton
from compressed_spec.kernels.fp8_rows import encode_rows, row_bytes
from compressed_spec.kernels.norm import rms_norm
from compressed_spec.kernels.rope import apply_rope
from compressed_spec.testing.exactness import assert_as_exact_as


def windows(num: int, tokens: int, num_rows: int) -> torch.Tensor:
    """Rows that windows pool; the first window is the first of its text, which has nothing before it."""
    rows_CK = torch.stack([torch.randperm(num_rows)[:tokens] for _ in range(num)]) if num else torch.empty(0, tokens)
    rows_CK = rows_CK.long()
    rows_CK[:1, : tokens // 2] = -1
    return rows_CK


def buffer_of(rows_CK: torch.Tensor, num_rows: int, width: int) -> torch.Tensor:
    """Raw rows, NaN where no window looks."""
    buffer_RD = torch.randn(num_rows, width) * 3
    named = torch.zeros(num_rows, dtype=torch.bool)
    named[rows_CK[rows_CK >= 0]] = True
    return buffer_RD.masked_fill(~named.unsqueeze(1), float("nan"))


@pytest.mark.parametrize("num_windows", [0, 1, 5])
@pytest.mark.parametrize(
    ("tokens", "overlap", "width"), [(8, True, 20), (16, False, 16), (6, False, 24), (128, False, 8)]
)
def test_equals_the_reference(num_windows: int, tokens: int, overlap: bool, width: int, device: torch.device) -> None:
    rows_CK = windows(num_windows, tokens, 150)
    buffer_RD = buffer_of(rows_CK, 150, width * (4 if overlap else 2))
    ours = compress_triton.pool_windows(buffer_RD.to(device), rows_CK.to(device), overlap=overlap)
    plain = compress.pool_windows(buffer_RD, rows_CK, overlap=overlap)
    assert_as_exact_as(ours.cpu(), plain, compress.pool_windows(buffer_RD.double(), rows_CK, overlap=overlap))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("tokens", "overlap"), [(8, True), (16, False)])
def test_entries_go_to_their_rows_and_to_no_others(
    tokens: int, overlap: bool, dtype: torch.dtype, device: torch.device
) -> None:
    width = 24
    rows_CK, angle_CP = windows(4, tokens, 40), torch.randn(4, 4)
    buffer_RD, weight_E = buffer_of(rows_CK, 40, width * (4 if overlap else 2)), torch.randn(width)
    out_rows_C = torch.tensor([7, -1, 0, 3])

    def entries(real: torch.dtype) -> torch.Tensor:
        wide = torch.promote_types(real, torch.float32)
        pooled_CE = compress.pool_windows(buffer_RD.to(wide), rows_CK, overlap=overlap).to(real)
        normed_C1E = rms_norm(pooled_CE, weight_E, 1e-6).unsqueeze(1)
        return apply_rope(normed_C1E, angle_CP.cos().to(wide), angle_CP.sin().to(wide)).squeeze(1)

    out_RE = torch.full((9, width), float("nan"), dtype=dtype, device=device)
    compress_triton.pool_entries(
        buffer_RD.to(device),
        rows_CK.to(device),
        weight_E.to(device),
        1e-6,
        angle_CP.cos().to(device),
        angle_CP.sin().to(device),
        out_RE,
        out_rows_C.to(device),
        overlap=overlap,
        dtype=dtype,
    )
    closing = out_rows_C >= 0
    written = out_RE[out_rows_C[closing].to(device)].cpu()
    assert_as_exact_as(written, entries(dtype)[closing], entries(torch.float64)[closing])
    assert out_RE.isnan().all(1).sum() == 6


def test_fp8_entries_are_the_packed_ones(device: torch.device) -> None:
    """Bit for bit those of the entries in float32."""
    width, num_rotated, rows_CK, angle_CP = 80, 16, windows(4, 8, 40).to(device), torch.randn(4, 8, device=device)
    buffer_RD, weight_E = torch.randn(40, 4 * width, device=device), torch.randn(width, device=device)
    out_rows_C = torch.tensor([7, -1, 0, 3], device=device)
    plain_RE = torch.zeros((9, width), device=device)
    packed_RB = torch.full((9, row_bytes(width, num_rotated)), 77, dtype=torch.uint8, device=device)
    for out in (plain_RE, packed_RB):
        compress_triton.pool_entries(
            buffer_RD,
            rows_CK,
            weight_E,
            1e-6,
            angle_CP.cos(),
            angle_CP.sin(),
            out,
            out_rows_C,
            overlap=True,
            dtype=torch.float32,
        )
    written = out_rows_C[out_rows_C >= 0]
    assert torch.equal(packed_RB[written], encode_rows(plain_RE[written], num_rotated))
    assert int((packed_RB == 77).all(1).sum()) == 6
