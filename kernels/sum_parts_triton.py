"""Sums of partial results in their order, so that they come out the same every time.

T = rows, P = parts, D = width
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import torch
import triton
import triton.language as tl

SUM_BLOCK = 1024


@triton.jit
def sum_parts_kernel(p_parts, p_plus, p_output, num_parts: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr):
    """output[t] = the sum of parts[t, p], p ascending, and of plus[t] unless that is None, in float32."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < D
    total = tl.load(p_parts + row * num_parts * D + channel, mask=inside, other=0.0)
    for part in range(1, num_parts):
        total += tl.load(p_parts + (row * num_parts + part) * D + channel, mask=inside, other=0.0)
    if p_plus is not None:
        total += tl.load(p_plus + row * D + channel, mask=inside, other=0.0).to(tl.float32)
    tl.store(p_output + row * D + channel, total.to(p_output.dtype.element_ty), mask=inside)


def sum_parts(parts_TPD: torch.Tensor, dtype: torch.dtype, plus_TD: torch.Tensor | None = None) -> torch.Tensor:
    """float32 parts, contiguous, and another summand of any dtype, to `[T, D]` of a dtype."""
    num_rows, num_parts, width = parts_TPD.shape
    output_TD = torch.empty((num_rows, width), dtype=dtype, device=parts_TPD.device)
    sum_parts_kernel[(num_rows, triton.cdiv(width, SUM_BLOCK))](
        parts_TPD,
        None if plus_TD is None else plus_TD.contiguous(),
        output_TD,
        num_parts=num_parts,
        D=width,
        BLOCK=SUM_BLOCK,
    )
    return output_TD
