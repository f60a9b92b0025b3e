"""Triton kernels compiled ahead of time, for chips that need not be there, and what the compiler says of them.

Imports triton: only for those who ask for its kernels. A process that runs kernels in Triton's interpreter
(TRITON_INTERPRET=1) cannot compile them.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TENSOR_CORES = ("tcgen05.mma", "wgmma.mma", "mma.sync")  # PTX, newest first
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
CUOBJDUMP = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A target: its compute capability (80 = A100, 90 = H100 / H200, 100 = B200) and shared memory a block, bytes."""

    capability: int
    shared_limit: int


CHIPS = (
    Chip(capability=80, shared_limit=163 * 1024),
    Chip(capability=90, shared_limit=227 * 1024),
    Chip(capability=100, shared_limit=227 * 1024),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One compilation of a kernel: a configuration that its launcher uses.

    name: "<op>/<configuration>". kernel: the `@triton.jit` function. signature: type of every argument that is not a
    constexpr: "*bf16" (pointers are 16-byte aligned), "fp32", "i32", "i64", or "i32:16" for a multiple of 16.
    constexprs: value of every other argument, and the options (`num_warps`, `num_stages`, `enable_fp_fusion`) where
    the launcher gives them. chips: compute capabilities it is for. tensor_cores: whether it must use them.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, object]
    chips: tuple[int, ...] = (80, 90, 100)
    tensor_cores: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one compilation came to.

    registers: a thread. spilled: bytes a thread of registers kept in memory (its stack frame, local memory included).
    shared: bytes a block. tensor_cores: the PTX instruction that uses them, None if none does. faults: why this must
    not ship, one sentence each.
    """

    case: str
    capability: int
    registers: int
    spilled: int
    shared: int
    tensor_cores: str | None
    faults: tuple[str, ...]


def compile_case(case: Case, chip: Chip) -> Report:
    """Compile for a chip and look at the result. Raises triton's own errors where the kernel does not compile."""
    names = list(case.kernel.arg_names)
    options = {name: case.constexprs[name] for name in OPTIONS if name in case.constexprs}
    constexprs = {name: value for name, value in case.constexprs.items() if name not in options}
    assert sorted(names) == sorted([*case.signature, *constexprs]), f"{case.name}: arguments are {names}"
    types = {name: case.signature.get(name, "constexpr").removesuffix(":16") for name in names}
    aligned = [
        i for i, name in enumerate(names) if types[name].startswith("*") or case.signature.get(name, "")[-3:] == ":16"
    ]
    source = ASTSource(case.kernel, types, constexprs, {(i,): [["tt.divisibility", 16]] for i in aligned})
    target = GPUTarget("cuda", chip.capability, 32)
    compiled = triton.compile(source, target=target, options={"enable_fp_fusion": True} | options)
    registers, spilled = _resources(compiled.asm["cubin"])
    tensor_cores = next((word for word in TENSOR_CORES if word in compiled.asm["ptx"]), None)
    shared = int(compiled.metadata.shared)
    faults = []
    if spilled:
        faults.append(f"{spilled} bytes a thread spilled")
    if shared > chip.shared_limit:
        faults.append(f"{shared} bytes of shared memory, and a block has {chip.shared_limit}")
    if case.tensor_cores and tensor_cores is None:
        faults.append("no tensor-core instruction")
    return Report(
        case=case.name,
        capability=chip.capability,
        registers=registers,
        spilled=spilled,
        shared=shared,
        tensor_cores=tensor_cores,
        faults=tuple(faults),
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes a thread, as the binary declares them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", told)
    assert found is not None, f"cuobjdump says {told!r}"
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def interpreted() -> bool:
    """Whether kernels of this process run in the interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
