"""Weights as they will be stored, straight-through: the forward reads the rounded ones, gradients pass unchanged.

O = output rows, I = input columns
"""

from collections.abc import Mapping

import torch

from compressed_spec.kernels.dequantize import dequantize_fp4, dequantize_fp8
from compressed_spec.models.deepseek_v4.stored_kinds import StoredKind, stored_kind
from compressed_spec.models.deepseek_v4.tiny_tensors import store_fp4, store_fp8

BLOCK = (128, 128)


def is_fp4(name: str) -> bool:
    """Whether a parameter is a stack of routed experts."""
    return stored_kind(name) is StoredKind.EXPERTS


def is_fp8(name: str) -> bool:
    """Whether a parameter is a linear that DeepSeek-V4 stores in FP8."""
    return stored_kind(name) is StoredKind.LINEAR


def rounded(name: str, value: torch.Tensor) -> torch.Tensor:
    """The value that a loader gets back for a parameter stored in FP4 or FP8; other parameters as they are."""
    if is_fp4(name):
        return dequantize_fp4(*store_fp4(value.flatten(0, 1))).view_as(value)
    if is_fp8(name):
        return dequantize_fp8(*store_fp8(value, "e8m0"), BLOCK)
    return value


def straight_through(parameters: Mapping[str, torch.Tensor], *, quantize: bool) -> dict[str, torch.Tensor]:
    """Rounded values of the parameters that are stored quantised, with the gradient of the parameter itself.

    Without `quantize` their own values, as tensors of the same kind: a compiled forward is not compiled anew when
    rounding begins.
    """
    result = {}
    for name, parameter in parameters.items():
        if is_fp4(name) or is_fp8(name):
            with torch.no_grad():
                change = rounded(name, parameter.detach()) - parameter if quantize else torch.zeros(())
            result[name] = parameter + change
    return result
