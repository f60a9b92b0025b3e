"""Whether a model's layers run as Triton's kernels, decided once, when it is loaded."""

import importlib.util
import os

import torch

KERNELS = ("auto", "torch", "triton")


def takes_triton(kernels: str, *, device: torch.device, dtype: torch.dtype, numerics: str) -> bool:
    """What "auto" means here, and whether what was asked for can be had.

    Raises ValueError for an unknown name, and for "triton" where the kernels do not run or do not keep a promise.
    """
    if kernels not in KERNELS:
        raise ValueError(f"Unknown kernels {kernels!r}: use one of {', '.join(KERNELS)}.")
    here = device.type == "cuda" and importlib.util.find_spec("triton") is not None
    fits = dtype != torch.float64 and numerics == "fast"
    if kernels != "triton":
        return kernels == "auto" and here and fits
    if not fits:
        raise ValueError(
            "kernels='triton' computes in float32 or narrower with fast numerics: leave it out, or the other dtype or "
            "numerics."
        )
    if not here and not (importlib.util.find_spec("triton") and os.environ.get("TRITON_INTERPRET") == "1"):
        raise ValueError(
            f"kernels='triton' needs a GPU and Triton, not {str(device)!r}: leave it out (TRITON_INTERPRET=1 runs the "
            "kernels on a CPU, slowly)."
        )
    return True
