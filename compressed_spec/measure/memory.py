"""The most memory that a stretch of work had in use: a GPU's as its allocator counts it, else the process's."""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from compressed_spec.measure.identity import peak_memory

_CLEAR_REFS = Path("/proc/self/clear_refs")  # writing 5 starts the kernel's high-water mark afresh (proc(5))
_STATUS = Path("/proc/self/status")


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes, and of what: "device", "process" (resident), or "process-lifetime" where a peak cannot be reset."""

    num_bytes: int
    of: str


class PeakMemory:
    """Watches from its making on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._can_reset = False
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with suppress(OSError):
                _CLEAR_REFS.write_text("5")
                self._can_reset = True

    def peak(self) -> Peak:
        """The most since then, what was in use already included."""
        if self._device.type == "cuda":
            return Peak(num_bytes=torch.cuda.max_memory_allocated(self._device), of="device")
        if self._can_reset:
            for line in _STATUS.read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return Peak(num_bytes=int(line.split()[1]) * 1024, of="process")
        return Peak(num_bytes=peak_memory(), of="process-lifetime")
