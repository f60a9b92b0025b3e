"""Check and time everything on one GPU in under 5 minutes, without a network: `python scripts/gpu_check.py`.

Kernels against float64, their bandwidth against the device's own copy, texts of a small model by whole rounds (CUDA
graphs) and by plain torch, and verify steps of V4-Flash's first layers with random weights in the stored formats,
beside transformers' implementation of the same layers. Writes JSON and prints tables; exits 1 if a kernel or the logits
are further off than torch in the same precision, twice, or if a text differs.
`--dry-run` runs all of it small, in Triton's interpreter on a CPU.
"""

import json
import os
import platform
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

SECONDS = 280.0  # of the whole run: what does not fit is left out, and said to be


def main(*, dry_run: bool = False, output: Path = Path("gpu_check.json")) -> None:
    """Run all checks.

    Args:
        dry_run: small, on the CPU: to test this script.
        output: file for the results, JSON.
    """
    begun = time.monotonic()
    if dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before the imports below
    import torch

    if not dry_run and not torch.cuda.is_available():
        sys.exit("gpu_check.py: no GPU here; --dry-run checks the script itself on the CPU.")
    device = torch.device("cpu" if dry_run else "cuda")

    from compressed_spec.measure.gpu.kernels import kernel_times
    from compressed_spec.measure.gpu.oracle import compare_with_transformers
    from compressed_spec.measure.gpu.parity import parities
    from compressed_spec.measure.gpu.random_flash import random_flash
    from compressed_spec.measure.gpu.scale import dry_scale, full_scale
    from compressed_spec.measure.gpu.steps import step_times
    from compressed_spec.measure.gpu.texts import differing_texts
    from compressed_spec.measure.gpu.timing import copy_bandwidth
    from compressed_spec.models.deepseek_v4.quantized import quantized_kernels

    scale = dry_scale() if dry_run else full_scale()
    results: dict[str, Any] = {"environment": _environment(device), "dry_run": dry_run, "seconds": {}}

    def done(section: str) -> None:
        results["seconds"][section] = round(time.monotonic() - begun - sum(results["seconds"].values()), 1)
        output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")  # what is there, should it break off

    results["parity"] = [asdict(one) | {"passed": one.passed} for one in parities(scale, device)]
    done("parity")
    results["copy_bandwidth"] = copy_bandwidth(scale.copy_bytes, device)
    results["kernels"] = [asdict(one) for one in kernel_times(scale, results["copy_bandwidth"], device)]
    done("kernels")
    compared = compare_with_transformers(scale, device)
    results["transformers"] = asdict(compared) | {"passed": compared.passed, "ratios": scale.oracle_ratios}
    done("transformers")
    results["texts"] = differing_texts(device, max_new_tokens=6 if dry_run else 64)
    done("texts")
    model = random_flash(scale.config(scale.ratios), scale.dtype, quantized_kernels(device), device)
    steps = step_times(model, scale, device, begun + SECONDS)
    results["steps"] = [asdict(one) | {"outside_experts": one.outside_experts} for one in steps]
    results["steps_wanted"] = len(scale.batches) * (len(scale.tree_sizes) + 1)
    results["layers"] = scale.ratios
    done("steps")
    results["targets"] = _targets(results)
    done("targets")
    _show(results)
    failed = [one["op"] for one in results["parity"] if not one["passed"]]
    failed += [] if compared.passed else ["transformers"]
    failed += [f"texts of {name}" for name, differing in results["texts"].items() if differing]
    if failed:
        sys.exit(f"gpu_check.py: different, or further off than twice torch's own error: {', '.join(failed)}")


def _environment(device: Any) -> dict[str, object]:
    import torch
    import triton

    gpu = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return {
        "gpu": gpu.name if gpu else None,
        "gpu_memory": gpu.total_memory if gpu else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "argv": sys.argv,
    }


def _targets(results: dict[str, Any]) -> list[dict[str, object]]:
    """What the kernels are meant to reach, where it was measured."""
    found: list[dict[str, object]] = []

    def target(name: str, measured: float | None, wanted: float, *, most: bool = False) -> None:
        met = None if measured is None else measured <= wanted if most else measured >= wanted
        found.append({"target": name, "measured": measured, "wanted": wanted, "met": met})

    def share(kernel: str, nodes: int) -> float | None:
        shares = [one["share"] for one in results["kernels"] if (one["kernel"], one["nodes"]) == (kernel, nodes)]
        return shares[0] if shares else None

    target("sparse attention at batch 64: share of copy bandwidth", share("sparse_attention/csa", 64), 0.70)
    target("FP4 experts at 8 nodes: share of copy bandwidth", share("fp4_experts", 8), 0.60)
    chains = {(one["batch"], one["nodes"]): one for one in results["steps"] if one["form"] == "chain"}
    for batch in sorted({batch for batch, _ in chains}):
        one, eight = chains.get((batch, 1)), chains.get((batch, 8))
        if one and eight:
            name = f"batch {batch}: 8 nodes against 1, outside the experts"
            target(name, eight["outside_experts"] / one["outside_experts"], 1.25, most=True)
            # The layers here are a part of the model's 43, and the bookkeeping is the whole model's.
            whole = eight["step"] * 43 / len(results["layers"])
            name = f"batch {batch}: commit and plan, share of a round of 43 layers"
            target(name, eight["bookkeeping"] / whole, 0.02, most=True)
    return found


def _show(results: dict[str, Any]) -> None:
    console = Console(width=120)
    for section, columns in (
        ("parity", ("op", "dtype", "error", "torch_error", "passed")),
        ("kernels", ("kernel", "nodes", "seconds", "num_bytes", "share")),
        ("steps", ("form", "nodes", "batch", "step", "experts", "outside_experts", "bookkeeping")),
        ("targets", ("target", "measured", "wanted", "met")),
    ):
        table = Table(*columns, title=section)
        for row in results[section]:
            table.add_row(*(f"{row[c]:.3g}" if isinstance(row[c], float) else str(row[c]) for c in columns))
        console.print(table)
    rest = {name: results[name] for name in ("environment", "copy_bandwidth", "transformers", "texts", "seconds")}
    console.print_json(json.dumps(rest))
    missing = results["steps_wanted"] - len(results["steps"])
    if missing:
        console.print(f"{missing} of {results['steps_wanted']} steps did not fit into the time.")


if __name__ == "__main__":
    tyro.cli(main)
