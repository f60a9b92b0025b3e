"""How many kernels a piece of device code launches, counted without a GPU."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton.runtime.jit
from torch.utils._python_dispatch import TorchDispatchMode

# Operations without a kernel: they describe memory, or make a number on the host. All others are counted as one.
_FREE = {
    "view", "_unsafe_view", "unsqueeze", "squeeze", "expand", "slice", "select", "transpose", "t", "permute", "detach",
    "alias", "as_strided", "split", "split_with_sizes", "unbind", "empty", "new_empty", "empty_like", "empty_strided",
    "chunk", "_reshape_alias", "promote_types", "scalar_tensor", "lift_fresh",
}  # fmt: skip


class _TorchKernels(TorchDispatchMode):
    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in _FREE:
            self.counts[f"torch.{name}"] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def count_launches() -> Iterator[Counter[str]]:
    """Counts by name: Triton kernels, and operations of torch that are not views (`torch.<name>`).

    What a Triton kernel's interpreter does with tensors is not counted. A matrix product counts as one.
    """
    counts: Counter[str] = Counter()
    mode = _TorchKernels(counts)
    interface = triton.runtime.jit.KernelInterface
    original = interface.__getitem__

    def counted(kernel: Any, grid: Any) -> Any:
        launch = original(kernel, grid)

        def run(*args: Any, **kwargs: Any) -> Any:
            counts[kernel.fn.__name__] += 1
            with torch.utils._python_dispatch._disable_current_modes():
                return launch(*args, **kwargs)

        return run

    interface.__getitem__ = counted
    try:
        with mode:
            yield counts
    finally:
        interface.__getitem__ = original
