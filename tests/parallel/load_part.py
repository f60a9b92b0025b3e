"""Load one process's part of a checkpoint, and print how much memory that took at most: run as a script."""

import argparse
import json
import time
from pathlib import Path

import torch

from compressed_spec.models.deepseek_v4.checkpoint import open_checkpoint
from compressed_spec.models.deepseek_v4.load import empty_model
from compressed_spec.models.deepseek_v4.weights import load_weights
from compressed_spec.parallel import ParallelGroup


def resident(field: str) -> int:
    """Bytes of this process's memory, its pages of mapped files included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    checkpoint, group = open_checkpoint(args.folder), ParallelGroup(rank=args.rank, size=args.size)
    model = empty_model(checkpoint, dtype=torch.bfloat16, group=group)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, begin = resident("VmRSS"), time.perf_counter()
    load_weights(model, checkpoint, device=args.device, progress=False, group=group)
    seconds = time.perf_counter() - begin
    sizes = sorted(tensor.nbytes for tensor in model.state_dict().values())
    print(
        json.dumps(
            {"peak": resident("VmHWM") - before, "weights": sum(sizes), "largest": sizes[-2:], "seconds": seconds}
        )
    )


if __name__ == "__main__":
    main()
