"""The indexer as Triton kernels: scores against the reference in float64, the choice against a stable sort."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressed_spec.kernels import indexer, indexer_triton
from compressed_spec.testing.exactness import assert_as_exact_as


def sorted_choice(scores_N: torch.Tensor, k: int) -> list[int]:
    """The k best by (score descending, index ascending), ascending, then -1."""
    best = sorted(range(len(scores_N)), key=lambda j: (-float(scores_N[j]), j))[:k]
    chosen = sorted(j for j in best if scores_N[j] > float("-inf"))
    return chosen + [-1] * (min(k, len(scores_N)) - len(chosen))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "width"), [(4, 16), (3, 20)])
def test_scores_equal_the_reference(heads: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
    """Three sequences: more keys than a tile, as many as its own extra ones, and none; NaN in rows of nobody."""
    spans = [(0, 2, 0, 150), (2, 5, 160, 32), (5, 6, 200, 0)]
    extra_rows_TX = torch.tensor([[250, -1], [251, 252], [-1, -1], [253, 254], [255, -1], [256, 257]])
    keys_RI = torch.full((260, width), float("nan"), dtype=dtype)
    for rows in (torch.arange(150), torch.arange(160, 192), extra_rows_TX[extra_rows_TX >= 0]):
        keys_RI[rows] = torch.randn(len(rows), width, dtype=dtype)
    q_THI, weights_TH = torch.randn(6, heads, width, dtype=dtype).float(), torch.randn(6, heads)

    def reference(real: torch.dtype) -> torch.Tensor:
        return indexer.index_scores(q_THI.to(real), weights_TH.to(real), keys_RI.to(real), spans, extra_rows_TX, 152)

    seen = reference(torch.float64) > float("-inf")
    for given_spans in (spans, torch.tensor(spans, device=device)):
        ours = indexer_triton.index_scores(
            q_THI.to(device), weights_TH.to(device), keys_RI.to(device), given_spans, extra_rows_TX.to(device), 152
        ).cpu()
        assert torch.equal(ours > float("-inf"), seen)
        assert_as_exact_as(ours[seen], reference(torch.float32)[seen], reference(torch.float64)[seen])


@settings(max_examples=25, deadline=None)
@given(
    num_entries=st.sampled_from([1, 2, 7, 300, 2049, 5000]),
    k=st.sampled_from([1, 3, 64, 512, 6000]),
    levels=st.sampled_from([1, 3, 40, 10**6]),
    seed=st.integers(0, 999),
)
def test_choice_equals_a_stable_sort(device: torch.device, num_entries: int, k: int, levels: int, seed: int) -> None:
    """With many ties, zeros of both signs, and entries that are not seen."""
    torch.manual_seed(seed)
    scores_TN = torch.randint(-levels, levels + 1, (2, num_entries)).float() / 7
    scores_TN[torch.rand(2, num_entries) < 0.2] = -0.0
    scores_TN[torch.rand(2, num_entries) < 0.3] = float("-inf")
    chosen_TK = indexer_triton.select_entries(scores_TN.to(device), k).cpu()
    assert chosen_TK.tolist() == [sorted_choice(scores_N, k) for scores_N in scores_TN]
    assert torch.equal(chosen_TK, indexer.select_entries(scores_TN, k))


def test_rows_of_the_choice(device: torch.device) -> None:
    scores_TN = torch.tensor([[5.0, 1.0, 4.0, 3.0], [1.0, 2.0, 3.0, float("-inf")]], device=device)
    base_T, count_T = torch.tensor([100, 200], device=device), torch.tensor([2, 3], device=device)
    extra_rows_TX = torch.tensor([[70, 71], [80, -1]], device=device)
    rows_TK = indexer_triton.select_rows(scores_TN, 3, base_T, count_T, extra_rows_TX)
    assert rows_TK.tolist() == [[100, 70, 71], [200, 201, 202]]


def test_no_entries(device: torch.device) -> None:
    q_THI, keys_RI = torch.randn(2, 4, 16, device=device), torch.randn(3, 16, device=device)
    none_TX = torch.empty(2, 0, dtype=torch.int64, device=device)
    scores_TN = indexer_triton.index_scores(q_THI, q_THI[..., 0], keys_RI, [(0, 2, 0, 0)], none_TX, 0)
    assert indexer_triton.select_entries(scores_TN, 4).shape == (2, 0)
