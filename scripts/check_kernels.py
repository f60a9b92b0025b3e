"""Compile every Triton kernel as it ships, for GPUs that need not be there: `python scripts/check_kernels.py`.

Prints registers, spilled bytes, shared memory and tensor-core use of each (kernel, configuration, chip). Exits 1 if
one spills, needs more shared memory than a block of the chip has, or misses the tensor cores it should use.
"""

import json
import sys
from dataclasses import asdict
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from compressed_spec.kernels.triton_cases import all_cases
from compressed_spec.kernels.triton_compile import CHIPS, Report, compile_case, interpreted


def main(
    only: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    *,
    chips: tuple[int, ...] = (80, 90, 100),
    json_lines: Annotated[bool, tyro.conf.arg(name="json")] = False,
) -> None:
    """Compile the cases and report.

    Args:
        only: cases whose name begins so; all of them if none is named.
        chips: compute capabilities, 80 90 100.
        json_lines: one JSON object a compilation in place of the table.
    """
    if interpreted():
        sys.exit("check_kernels.py: unset TRITON_INTERPRET, interpreted kernels cannot be compiled.")
    cases = [case for case in all_cases() if not only or case.name.startswith(only)]
    if not cases:
        sys.exit(f"check_kernels.py: no case begins with {' or '.join(only)}.")
    reports = []
    for case in cases:
        for chip in CHIPS:
            if chip.capability in chips and chip.capability in case.chips:
                reports.append(compile_case(case, chip))
                if json_lines:
                    print(json.dumps(asdict(reports[-1])), flush=True)
    if not json_lines:
        Console(width=140, soft_wrap=True).print(_table(reports))
    faulty = [report for report in reports if report.faults]
    for report in faulty:
        print(f"{report.case} on sm_{report.capability}: {'; '.join(report.faults)}", file=sys.stderr)
    sys.exit(bool(faulty))


def _table(reports: list[Report]) -> Table:
    table = Table("kernel", "chip", "registers", "spilled B", "shared B", "tensor cores")
    for report in reports:
        table.add_row(
            report.case,
            f"sm_{report.capability}",
            str(report.registers),
            str(report.spilled),
            str(report.shared),
            report.tensor_cores or "-",
        )
    return table


if __name__ == "__main__":
    tyro.cli(main)
