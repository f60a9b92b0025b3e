"""How exact a kernel must be: as exact as torch is in the same precision, or nearly."""

import torch


def assert_as_exact_as(actual: torch.Tensor, same_precision: torch.Tensor, exact: torch.Tensor, *, ulps: float) -> None:
    """Fail unless `actual` is at most twice as far from `exact` (float64) as torch's own `same_precision` is.

    ulps: of the largest exact value, in the dtype of `actual`, that are granted where torch happens to be exact.
    """
    assert actual.shape == exact.shape, f"shape {list(actual.shape)}, expected {list(exact.shape)}"
    assert bool(torch.isfinite(actual).all()), "not finite"
    scale = float(exact.abs().max()) if exact.numel() else 0.0
    error = float((actual.double() - exact).abs().max()) if exact.numel() else 0.0
    reference = float((same_precision.double() - exact).abs().max()) if exact.numel() else 0.0
    allowed = 2 * reference + ulps * torch.finfo(same_precision.dtype).eps * scale
    assert error <= allowed, f"off by {error:.3g} at scale {scale:.3g}, torch by {reference:.3g}"
