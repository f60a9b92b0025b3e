"""Sparse attention as a Triton kernel, against the reference in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressed_spec.kernels import attention
from compressed_spec.kernels.attention_triton import runs_of, sparse_attention
from compressed_spec.kernels.fp8_rows import decode_rows, encode_rows
from compressed_spec.testing.exactness import assert_as_exact_as


def random_rows(num_rows: int, *shape: int) -> torch.Tensor:
    """Lists of row ids, a third of them -1, and the first list -1 throughout."""
    rows_TK = torch.randint(0, num_rows, shape).masked_fill(torch.rand(shape) < 0.33, -1)
    rows_TK[0] = -1
    return rows_TK


def pool_of(rows_TK: torch.Tensor, num_rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """A pool with NaN in every row that no list names."""
    named = torch.zeros(num_rows, dtype=torch.bool)
    named[rows_TK[rows_TK >= 0]] = True
    return torch.randn(num_rows, width, dtype=dtype).masked_fill(~named.unsqueeze(1), float("nan"))


@settings(max_examples=20, deadline=None)
@given(
    num_nodes=st.integers(1, 5),
    num_heads=st.sampled_from([1, 4, 7, 16, 20]),
    head_dim=st.sampled_from([8, 24, 32]),
    window=st.sampled_from([0, 1, 16, 33]),
    compressed=st.sampled_from([None, 0, 5, 70, 200]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    processors=st.sampled_from([1, 64]),
    seed=st.integers(0, 99),
)
def test_equals_the_reference(
    device: torch.device,
    num_nodes: int,
    num_heads: int,
    head_dim: int,
    window: int,
    compressed: int | None,
    dtype: torch.dtype,
    processors: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    q_THD, sink_H = torch.randn(num_nodes, num_heads, head_dim, dtype=dtype), torch.randn(num_heads)
    window_rows_TW = random_rows(40, num_nodes, window)
    window_RD = pool_of(window_rows_TW, 40, head_dim, dtype)
    entries_RD, rows_TK = None, None
    if compressed is not None:
        rows_TK = random_rows(90, num_nodes, compressed)
        entries_RD = pool_of(rows_TK, 90, head_dim, dtype)

    plain = attention.sparse_attention(q_THD, window_RD, window_rows_TW, entries_RD, rows_TK, sink_H)
    exact = attention.sparse_attention(
        q_THD.double(),
        window_RD.double(),
        window_rows_TW,
        None if entries_RD is None else entries_RD.double(),
        rows_TK,
        sink_H.double(),
    )
    ours = sparse_attention(
        q_THD.to(device),
        window_RD.to(device),
        window_rows_TW.to(device),
        None if entries_RD is None else entries_RD.to(device),
        None if rows_TK is None else rows_TK.to(device),
        sink_H.to(device),
        num_processors=processors,
    )
    assert_as_exact_as(ours.cpu(), plain, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("processors", [1, 64])
@pytest.mark.parametrize(("width", "num_rotated"), [(72, 8), (144, 16)])
def test_fp8_rows(width: int, num_rotated: int, processors: int, dtype: torch.dtype, device: torch.device) -> None:
    """Rows of every size, subnormal codes among them, and bytes that are no numbers where no list looks."""
    q_THD, sink_H = torch.randn(3, 5, width, dtype=dtype), torch.randn(5)
    lists, pools = [], []
    for num_rows, length in ((40, 33), (90, 70)):
        rows_TK = random_rows(num_rows, 3, length)
        values_RD = torch.randn(num_rows, width) * torch.logspace(-3, 0.5, width)
        packed_RB = encode_rows(values_RD, num_rotated)
        unnamed = torch.ones(num_rows, dtype=torch.bool)
        unnamed[rows_TK[rows_TK >= 0]] = False
        packed_RB[unnamed] = 255
        lists.append(rows_TK)
        pools.append(packed_RB)
    exact_pools = [decode_rows(pool_RB, width, num_rotated).double() for pool_RB in pools]
    exact = attention.sparse_attention(
        q_THD.double(), exact_pools[0], lists[0], exact_pools[1], lists[1], sink_H.double()
    )
    plain = attention.sparse_attention(q_THD, pools[0], lists[0], pools[1], lists[1], sink_H, num_rotated)
    ours = sparse_attention(
        q_THD.to(device),
        pools[0].to(device),
        lists[0].to(device),
        pools[1].to(device),
        lists[1].to(device),
        sink_H.to(device),
        num_rotated,
        num_processors=processors,
    )
    assert_as_exact_as(ours.cpu(), plain, exact)


def test_no_nodes(device: torch.device) -> None:
    q_THD, rows_TW = torch.randn(0, 4, 8, device=device), torch.empty(0, 3, dtype=torch.int64, device=device)
    assert sparse_attention(q_THD, q_THD[:, 0], rows_TW, None, None, q_THD[0:0, 0, 0]).shape == (0, 4, 8)


def test_no_sink(device: torch.device) -> None:
    """A sink of -inf is none: the weights of the rows sum to 1."""
    q_THD, pool_RD = torch.randn(1, 2, 16, device=device), torch.ones(40, 16, device=device)
    rows_TW = torch.arange(40, device=device).unsqueeze(0)
    sink_H = torch.full((2,), float("-inf"), device=device)
    for processors in (1, 64):
        output_THD = sparse_attention(q_THD, pool_RD, rows_TW, None, None, sink_H, num_processors=processors)
        torch.testing.assert_close(output_THD, torch.ones_like(q_THD))


@pytest.mark.parametrize("num_programs", [1, 7, 64, 500])
@pytest.mark.parametrize("num_tiles", [0, 1, 2, 5, 20, 260])
def test_runs_cover_the_list_once(num_programs: int, num_tiles: int) -> None:
    num_runs, tiles_a_run = runs_of(num_programs, num_tiles, 132)
    assert num_runs >= 1
    assert (num_runs - 1) * tiles_a_run < max(num_tiles, 1) <= num_runs * tiles_a_run
    assert num_runs == 1 or num_runs * num_programs <= 132
