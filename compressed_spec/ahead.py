"""Functions of tensors, compiled ahead of time for a CPU and kept on disk.

Called without Python between their operations: the functions of a decoding step run for some hundred microseconds, and
torch.compile's way into one takes as long. What is on disk is found by what went into it: the function's source,
description and inputs, torch, the compiler and the processor.
"""

import hashlib
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.fx.experimental._config as symbolic_shapes
from torch import nn
from torch.export import Dim, export
from tqdm import tqdm

# Weights stay out of the package, short ones too: it is for others as well.
_OPTIONS = {"aot_inductor.package_constants_in_so": False, "always_keep_tensor_constants": True}
_PREFIX = "function."  # of weights' names in a package


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a function is compiled for: tensors like these, whose open axes may have any length, 0 and 1 included.

    No two open axes that may differ may be of one length here, or of length 0 or 1.
    """

    tensors: Sequence[torch.Tensor]
    open_axes: Sequence[tuple[int, ...]]

    @property
    def description(self) -> tuple[object, ...]:
        return tuple(
            (str(tensor.dtype), axes, tuple(0 if axis in axes else size for axis, size in enumerate(tensor.shape)))
            for tensor, axes in zip(self.tensors, self.open_axes, strict=True)
        )


class _Flat(nn.Module):
    """The function, of any number of tensors: what export calls by number instead of by name."""

    def __init__(self, function: nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> object:
        return self.function(*inputs)


class Program:
    """A compiled function with weights of its own. Many may share one package.

    weights: parameters and buffers by name. They are read where they lie, so they must not be replaced.
    """

    def __init__(self, package: Path, weights: Mapping[str, torch.Tensor]) -> None:
        loaded = torch._inductor.aoti_load_package(str(package), run_single_threaded=True)
        self._weights = {name: weights[name.removeprefix(_PREFIX)] for name in loaded.get_constant_fqns()}
        loaded.load_constants(self._weights, check_full_update=True, user_managed=True)
        self._loaded = loaded
        self.run: Callable[[list[torch.Tensor]], list[torch.Tensor]] = loaded.loader.run


def weights_of(function: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers."""
    return dict(function.named_parameters()) | dict(function.named_buffers())


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A function to compile for these inputs.

    description: all that it depends on beside its inputs and its weights' names, shapes, strides and dtypes; source: a
    digest of the code that it runs (see `source_digest`). Its parameters must not require gradients.
    """

    function: nn.Module
    inputs: Inputs
    description: object
    source: str

    @property
    def package(self) -> Path:
        """Where what is compiled for it lies, or will."""
        name = type(self.function).__name__
        weights = tuple((key, str(w.dtype), tuple(w.shape), w.stride()) for key, w in weights_of(self.function).items())
        parts = (_OPTIONS, self.description, self.source, weights, self.inputs.description, _machine())
        what = repr((name, torch.get_num_threads(), *parts))
        return cache_folder() / f"{name}-{hashlib.sha256(what.encode()).hexdigest()[:32]}.pt2"


def packages_for(jobs: Sequence[Job], *, progress: bool = False) -> list[Path]:
    """Each job's package; those that are not on disk yet are compiled (some 10 to 30 seconds each), several at a time.

    Raises RuntimeError where the compiler fails.
    """
    packages = [job.package for job in jobs]
    missing = {package: job for package, job in zip(packages, jobs, strict=True) if not package.exists()}
    if len(missing) == 1:
        ((package, job),) = missing.items()
        with _new_file(package) as part:
            compile_to(part, job.function, job.inputs)
    elif missing:
        bar = tqdm(total=len(missing), desc="compiling", disable=None if progress else True)
        with bar, ThreadPoolExecutor(os.cpu_count()) as pool:
            for done in as_completed([pool.submit(_compile_apart, package, job) for package, job in missing.items()]):
                done.result()
                bar.update()
    return packages


def cache_folder() -> Path:
    """Where packages are kept; everything in it may be deleted."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "compressed_spec" / "compiled"


@contextmanager
def _new_file(package: Path) -> Iterator[Path]:
    """A file to write, which becomes the package once it is whole."""
    package.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with TemporaryDirectory(dir=package.parent, prefix=".") as folder:
        part = Path(folder, package.name)
        yield part
        part.replace(package)


def _compile_apart(package: Path, job: Job) -> None:
    """In a process of its own, for torch compiles one function at a time in one process."""
    with _new_file(package) as part:
        given = part.with_suffix(".job")
        torch.save((job.function, job.inputs, torch.get_num_threads()), given)
        command = [sys.executable, "-m", "compressed_spec.ahead", str(given), str(part)]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError(f"{type(job.function).__name__} could not be compiled:\n{run.stderr[-2000:]}")


def compile_to(package: Path, function: nn.Module, inputs: Inputs) -> None:
    """Compile a function to this file, in this process."""
    open_axes = tuple(dict.fromkeys(axes, Dim.AUTO) for axes in inputs.open_axes)
    tensors = tuple(tensor.clone() for tensor in inputs.tensors)  # one that is given twice would be taken for one input
    # Oblivious: no code of its own for lengths 0 and 1, and none that rules them out.
    with torch.no_grad(), warnings.catch_warnings(), symbolic_shapes.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        warnings.simplefilter("ignore", FutureWarning)  # torch's, of itself
        exported = export(_Flat(function).eval(), tensors, dynamic_shapes=(open_axes,), strict=False)
        given = [node.meta["val"] for node in exported.graph.nodes if node.op == "placeholder"][-len(tensors) :]
        for index, (tensor, axes) in enumerate(zip(given, inputs.open_axes, strict=True)):
            for axis in axes:
                # A length that the function asked about is a symbol of one value.
                node = getattr(tensor.shape[axis], "node", None)
                assert node is not None, f"axis {axis} of input {index} was taken as constant"
                assert node.maybe_as_int() is None, f"axis {axis} of input {index} was taken as constant"
        torch._inductor.aoti_compile_and_package(exported, package_path=str(package), inductor_configs=dict(_OPTIONS))


def source_digest(*paths: Path) -> str:
    """Of Python files, and of those in folders."""
    digest = hashlib.sha256()
    for path in paths:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()


def _machine() -> tuple[str, ...]:
    """What compiled code depends on beside the function: torch, the compiler and the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = [line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")] if cpuinfo.exists() else []
    cpu = (platform.machine(), platform.processor(), torch.backends.cpu.get_cpu_capability(), *flags[:1])
    return torch.__version__, os.environ.get("CXX", ""), *cpu


if __name__ == "__main__":
    function, inputs, num_threads = torch.load(sys.argv[1], weights_only=False)  # what `_compile_apart` saved
    torch.set_num_threads(num_threads)
    compile_to(Path(sys.argv[2]), function, inputs)
