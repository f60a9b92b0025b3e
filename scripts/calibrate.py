"""Measure a drafter's acceptance by depth and rank: `python scripts/calibrate.py MODEL OUT.json --prompt-file FILE`.

The file serves `--tree optimal_dD:OUT.json` and `--tree dynamic:OUT.json`. Measure on text like that to come, and at
the temperature to come.
"""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from compressed_spec.measure.calibrate import CALIBRATION_SHAPE, calibrate
from compressed_spec.models.deepseek_v4.checkpoint import open_checkpoint
from compressed_spec.models.deepseek_v4.load import checkpoint_folder, load_model
from compressed_spec.text import load_tokenizer
from compressed_spec.tree import parse_tree


def main(
    model: Annotated[str, tyro.conf.Positional],
    out: Annotated[Path, tyro.conf.Positional],
    *,
    prompt_file: Path,
    drafter: str = "auto",
    tree: str = str(CALIBRATION_SHAPE),
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 8,
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32",
    device: str = "cpu",
) -> None:
    """Decode the prompts and write what was accepted to OUT.

    Args:
        model: checkpoint: a folder, a hub id, or "demo".
        out: the JSON file to write.
        prompt_file: one prompt a line.
        drafter: as for `generate`.
        tree: sN_kK_dD of the fixed tree to measure with: at least as deep and wide as those to come.
        max_new_tokens: tokens a prompt.
        temperature: of sampling, with coupled noise above 0.
        seed: of the sampling noise.
        batch_size: prompts decoded together.
        dtype: of weights, activations and KV.
        device: where to run.
    """
    shape = parse_tree(tree)
    if shape is None:
        raise SystemExit("calibrate.py: --tree 'off' drafts nothing to measure: name a tree.")
    prompts = [line for line in prompt_file.read_text(encoding="utf-8").splitlines() if line.strip()]
    folder = checkpoint_folder(model)
    tokenizer = load_tokenizer(open_checkpoint(folder).folder)
    measured = calibrate(
        load_model(folder, device=device, dtype=dtype),
        [tokenizer(prompt)["input_ids"] for prompt in prompts],
        drafter=drafter,
        shape=shape,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        batch_size=batch_size,
    )
    measured.save(str(out))
    for depth, (rates, counts) in enumerate(zip(measured.acceptance, measured.num_tried, strict=True), start=1):
        print(f"depth {depth} ({counts[0]} seen): " + ", ".join(f"{rate:.3f}" for rate in rates))


if __name__ == "__main__":
    tyro.cli(main)
