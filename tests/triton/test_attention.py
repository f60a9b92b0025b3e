"""Sparse attention as a Triton kernel against the reference in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressed_spec.kernels import attention
from compressed_spec.kernels.attention_triton import runs_of, sparse_attention


def random_rows(num_rows: int, *shape: int) -> torch.Tensor:
    """Lists of row ids, a third of them -1."""
    rows = torch.randint(0, num_rows, shape)
    return rows.masked_fill(torch.rand(shape) < 0.33, -1)


def poisoned(pool_RD: torch.Tensor, *lists: torch.Tensor) -> torch.Tensor:
    """The pool with NaN in every row that no list names."""
    named = torch.zeros(len(pool_RD), dtype=torch.bool)
    for rows in lists:
        named[rows[rows >= 0]] = True
    return pool_RD.masked_fill(~named.unsqueeze(1), float("nan"))


@settings(max_examples=12, deadline=None)
@given(
    num_nodes=st.integers(1, 5),
    num_heads=st.sampled_from([1, 4, 7, 16, 20]),
    head_dim=st.sampled_from([8, 24, 32]),
    window=st.sampled_from([0, 1, 16, 33]),
    compressed=st.sampled_from([None, 0, 5, 70]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    processors=st.sampled_from([1, 64]),
    seed=st.integers(0, 99),
)
def test_equals_the_reference(num_nodes, num_heads, head_dim, window, compressed, dtype, processors, seed):
    torch.manual_seed(seed)
    q = torch.randn(num_nodes, num_heads, head_dim, dtype=dtype)
    window_rows = random_rows(40, num_nodes, window)
    pool = poisoned(torch.randn(40, head_dim, dtype=dtype), window_rows)
    entries, rows = None, None
    if compressed is not None:
        rows = random_rows(90, num_nodes, compressed)
        entries = poisoned(torch.randn(90, head_dim, dtype=dtype), rows)
    sink = torch.randn(num_heads)
    args = (q, pool, window_rows, entries, rows, sink)
    wide = [x if x is None or not x.is_floating_point() else x.double() for x in args]
    exact = attention.sparse_attention(*wide)
    plain = attention.sparse_attention(*args)
    ours = sparse_attention(*args, num_processors=processors)
    err = (ours.double() - exact).abs().max(); ref = (plain.double() - exact).abs().max()
    print(err, ref)
    assert err <= 2 * ref + 1e-7
