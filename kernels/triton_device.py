"""What launchers of Triton kernels ask a device."""

from contextlib import AbstractContextManager, nullcontext

import torch

INTERPRETED_PROCESSORS = 4  # on a CPU, where only the interpreter runs them


def multiprocessors(device: torch.device) -> int:
    """Programs that run side by side on a GPU."""
    if device.type != "cuda":
        return INTERPRETED_PROCESSORS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Within it kernels are launched on this device: Triton asks for the current one, not for its arguments'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
