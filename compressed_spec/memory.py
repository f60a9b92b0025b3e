"""How much memory a device still has, so that what cannot fit is refused before any of it is taken."""

from pathlib import Path

import torch

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def free_bytes(device: torch.device) -> int | None:
    """Bytes that may still be allocated on a device, None where the system does not say."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    if device.type != "cpu":
        return None
    known = [free for free in (_system_free(), _container_free()) if free is not None]
    return min(known, default=None)


def check_fits(what: str, num_bytes: int, device: torch.device, remedy: str) -> None:
    """Raise ValueError if `what` takes more bytes than the device has left."""
    free = free_bytes(device)
    if free is not None and num_bytes > free:
        raise ValueError(
            f"{what} of {human_bytes(num_bytes)} does not fit into the {human_bytes(free)} that are free in the memory "
            f"of {str(device)!r}: {remedy}."
        )


def human_bytes(num_bytes: int) -> str:
    """ "3.2 GiB"."""
    if num_bytes < 1024:
        return f"{num_bytes} B"
    size = num_bytes / 1024
    for unit in ("KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def _system_free() -> int | None:
    """Linux's estimate of what can be had without swapping."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _container_free() -> int | None:
    """What a control group's limit leaves; caches that the kernel would give back do not count as used."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    return int(limit) - used + int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
