"""Rows further away than 32 bits count: the last row of these pools, mostly untouched memory, lies beyond 2^31."""

import pytest
import torch

from compressed_spec.kernels.attention_triton import sparse_attention
from compressed_spec.kernels.compress_triton import pool_entries, pool_windows
from compressed_spec.kernels.indexer_triton import index_scores
from compressed_spec.kernels.norm_rope_triton import apply_rope

STRIDE = 2**30 + 64  # elements from a row to the next
ROWS = torch.tensor([[2, -1, 1, 0], [0, 2, -1, 2]])

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would have to own all of that memory")


def far_apart(rows_RD: torch.Tensor) -> torch.Tensor:
    """The same rows, `STRIDE` apart."""
    far_RD = torch.empty_strided(rows_RD.shape, (STRIDE, 1), dtype=rows_RD.dtype)
    return far_RD.copy_(rows_RD)


def test_attention() -> None:
    near_RD, q_THD = torch.randn(3, 16, dtype=torch.float16), torch.randn(2, 2, 16, dtype=torch.float16)
    far_RD, sink_H = far_apart(near_RD), torch.zeros(2)
    expected_THD = sparse_attention(q_THD, near_RD, ROWS, near_RD, ROWS, sink_H)
    assert torch.equal(sparse_attention(q_THD, far_RD, ROWS, far_RD, ROWS, sink_H), expected_THD)


def test_pooling() -> None:
    near_RD = torch.randn(3, 16)
    far_RD = far_apart(near_RD)
    assert torch.equal(pool_windows(far_RD, ROWS, overlap=True), pool_windows(near_RD, ROWS, overlap=True))
    angle_CP, weight_E, out_rows_C = torch.randn(2, 2), torch.ones(8), torch.tensor([2, 0])
    outs = [torch.zeros(3, 8), far_apart(torch.zeros(3, 8))]
    for out_RE in outs:
        pool_entries(
            near_RD,
            ROWS,
            weight_E,
            1e-6,
            angle_CP,
            angle_CP,
            out_RE,
            out_rows_C,
            overlap=False,
            dtype=torch.float32,
        )
    assert torch.equal(*outs)


def test_index_scores() -> None:
    near_RI, q_THI = torch.randn(3, 16), torch.randn(2, 4, 16)
    far_RI, spans = far_apart(near_RI), [(0, 2, 1, 2)]
    expected_TN = index_scores(q_THI, q_THI[..., 0], near_RI, spans, ROWS, 5)
    assert torch.equal(index_scores(q_THI, q_THI[..., 0], far_RI, spans, ROWS, 5), expected_TN)


def test_rows_written() -> None:
    x_THD, angle_TP = torch.randn(3, 1, 8), torch.randn(3, 2)
    out_RD = far_apart(torch.zeros(3, 8))
    apply_rope(x_THD, angle_TP.cos(), angle_TP.sin(), out_NX=out_RD)
    assert torch.equal(out_RD, apply_rope(x_THD, angle_TP.cos(), angle_TP.sin()).squeeze(1))
