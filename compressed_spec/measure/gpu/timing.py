"""Seconds of device work, from a CUDA graph and with a cold L2 cache."""

import time
from collections.abc import Callable

import torch
import triton.testing

from compressed_spec.models.deepseek_v4.graphs import CudaCapture


def seconds(work: Callable[[], object], device: torch.device, *, milliseconds: int = 20) -> float:
    """Median time of work that syncs with nothing. milliseconds: how long to repeat it. Without a GPU: of one run."""
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    def body() -> None:
        work()

    replay = CudaCapture()(body)
    median = triton.testing.do_bench(replay, warmup=milliseconds // 4, rep=milliseconds, return_mode="median")
    return float(median) * 1e-3


def copy_bandwidth(num_bytes: int, device: torch.device) -> float:
    """Bytes a second, read and written, of the device's own copy."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(lambda: target.copy_(source), device)
