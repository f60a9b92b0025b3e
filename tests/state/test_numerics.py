"""The report on a verification's numerics, and what it must say of this engine."""

import pytest
import torch

from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.numerics import verify_report
from compressed_spec.testing import Reference, random_model


@pytest.mark.parametrize("tree", ["s3_k2_d6", "s9_k1_d10", "s4_k3_d13"])
def test_T35_float64(reference: Reference, text: list[int], tree: str) -> None:
    report = verify_report(reference.model, text[:7], 30, tree=tree)
    assert report.num_rows == 30
    assert report.max_difference <= 1e-10 * report.scale
    assert report.min_margin > 1e-10
    assert report.flips == ()


@pytest.mark.parametrize("ratios", [(0, 4, 8), (4, 4), (3, 0)])
def test_T35_float32(text: list[int], ratios: tuple[int, ...]) -> None:
    report = verify_report(random_model(ratios, dtype=torch.float32), text[:7], 30, tree="s4_k2_d9")
    assert report.max_difference <= 1e-4 * report.scale
    assert all(flip.margin <= 1e-4 * report.scale for flip in report.flips)


def test_T35_the_report_finds_a_verify_that_is_off(text: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits that change with the number of nodes, as those of other engines do; row 0 of 48 gains the difference."""
    model = random_model((0, 4))
    honest = verify_report(model, text[:7], 12)
    logits = DeepseekV4.logits

    def skewed(self: DeepseekV4, streams_TMD: torch.Tensor) -> torch.Tensor:
        result_TV = logits(self, streams_TMD)
        result_TV[:, 0] += 100.0 * (len(result_TV) > 1)
        return result_TV

    monkeypatch.setattr(DeepseekV4, "logits", skewed)
    report = verify_report(model, text[:7], 12, tree="s3_k1_d4")
    assert report.max_difference == pytest.approx(100.0)
    assert report.min_margin == pytest.approx(honest.min_margin)
    assert [flip.position for flip in report.flips] == list(range(8, 20))
    assert all(flip.difference == pytest.approx(100.0) for flip in report.flips)


def test_T35_what_it_refuses(mixed: Reference, text: list[int]) -> None:
    with pytest.raises(ValueError, match="name a shape"):
        verify_report(mixed.model, text[:4], 5, tree="off")
    with pytest.raises(ValueError, match="num_tokens must be at least 1"):
        verify_report(mixed.model, text[:4], 0)
