"""Measure after which layer drafts pay most: `python scripts/exit_layer.py MODEL --prompt-file FILE`.

Prints one line a layer, and what to give as `--drafter`. Measure on text like that to come. The speed-ups are estimates
for chains, as if every pass through a layer took the same time; a model not trained for early exit has none.
"""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from compressed_spec.measure.exit_layer import best_exit, exit_layers
from compressed_spec.models.deepseek_v4.checkpoint import open_checkpoint
from compressed_spec.models.deepseek_v4.load import checkpoint_folder, load_model
from compressed_spec.text import load_tokenizer


def main(
    model: Annotated[str, tyro.conf.Positional],
    *,
    prompt_file: Path,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    dtype: Literal["float32", "float64", "bfloat16", "float16"] = "float32",
    device: str = "cpu",
) -> None:
    """Decode the prompts plainly and compare every layer's next tokens with the last one's.

    Args:
        model: checkpoint: a folder, a hub id, or "demo".
        prompt_file: one prompt a line.
        max_new_tokens: tokens a prompt.
        temperature: of sampling.
        seed: of the sampling noise.
        dtype: of weights, activations and KV.
        device: where to run.
    """
    prompts = [line for line in prompt_file.read_text(encoding="utf-8").splitlines() if line.strip()]
    folder = checkpoint_folder(model)
    tokenizer = load_tokenizer(open_checkpoint(folder).folder)
    layers = exit_layers(
        load_model(folder, device=device, dtype=dtype),
        [tokenizer(prompt)["input_ids"] for prompt in prompts],
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
    )
    for one in layers:
        speedup = one.speedup(one.num_steps)
        print(f"layer {one.layer}: acceptance {one.acceptance:.3f}, {one.num_steps} steps, speed-up {speedup:.2f}")
    best = best_exit(layers)
    print(f"--drafter early-exit:{best.layer} --tree s{best.num_steps}_k1_d{best.num_steps + 1}")


if __name__ == "__main__":
    tyro.cli(main)
