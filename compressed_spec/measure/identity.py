"""What a measurement was made with, so that it can be told from another and made again."""

import hashlib
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

PACKAGES = ("compressed-spec", "torch", "transformers", "numpy")


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """Of Python and the packages that matter; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def machine() -> dict[str, str | int | None]:
    """The processor, and how many of its threads this process may use."""
    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "processor": processor(),
        "num_cpus": num_cpus(),
        "capability": torch.backends.cpu.get_cpu_capability(),
    }


def processor() -> str | None:
    """The processor's name, None where the system does not say."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or None


def num_cpus() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def git_revision(changed: str = "+changes") -> str | None:
    """The revision that this package runs from, with `changed` behind it where the tree differs; None outside git."""
    root = Path(__file__).resolve().parents[2]
    tracked = _git(root, "ls-files", "--error-unmatch", str(Path(__file__).resolve()))  # not so in site-packages
    revision = _git(root, "rev-parse", "HEAD")
    if tracked is None or revision is None:
        return None
    return revision + (changed if _git(root, "status", "--porcelain", "--untracked-files=no") else "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        ran = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False)
    except OSError:  # no git here
        return None
    return ran.stdout.strip() if ran.returncode == 0 else None


def checkpoint_hash(folder: Path) -> str:
    """SHA-256 over the names and bytes of config.json and the weights."""
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        digest.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def peak_memory() -> int:
    """Bytes that this process has held at most (resident), as the operating system counts them."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def thread_settings() -> dict[str, str]:
    """Variables of the environment that change how threads wait for work, where they are set.

    Operations here are small, and threads that sleep between them cost more than the second one brings.
    """
    return {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "MKL_", "KMP_", "GOMP_"))}


def command_line(argv: Sequence[str] | None = None) -> list[str]:
    """The arguments of this process, its program's folder left out."""
    program, *arguments = sys.argv if argv is None else argv
    return [Path(program).name, *arguments]
