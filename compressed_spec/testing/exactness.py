"""How far a kernel may be from the exact result: no further than torch is in the same precision, twice."""

import torch


def assert_as_exact_as(ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    """`ours` is at most twice as far from `exact` (float64) as `plain`, plus one rounding of the largest value.

    `plain` and `exact` may have more rows, which come after ours: a few values alone may happen to be all but exact.
    """
    assert plain.shape == exact.shape
    assert ours.shape == (len(ours), *exact.shape[1:])
    assert ours.dtype == plain.dtype
    if not ours.numel():
        return
    allowed = 2 * (plain.double() - exact).abs().max() + torch.finfo(ours.dtype).eps * exact.abs().max()
    error = (ours.double() - exact[: len(ours)]).abs().max()
    assert error <= allowed, f"error {error:.3g}, and torch in {ours.dtype} allows {allowed:.3g}"
