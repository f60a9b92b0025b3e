"""Write a small random DeepSeek-V4 checkpoint in a real layout: `python scripts/make_tiny_checkpoint.py FOLDER`."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint


def main(
    folder: Annotated[Path, tyro.conf.Positional],
    *,
    seed: int = 0,
    layout: Literal["upstream", "transformers"] = "upstream",
    experts: Literal["fp4", "fp8", "bf16"] = "fp4",
    scale_dtype: Literal["e8m0", "f32"] = "e8m0",
    draft_head: Literal["mtp", "dspark", "none"] | None = None,
    compress_ratios: tuple[int, ...] = (0, 4, 128, 4),
    hidden_size: int = 128,
    vocab_size: int = 384,
) -> None:
    """Write config.json, a tokenizer and sharded random weights to FOLDER.

    Args:
        folder: where to; made if it does not exist.
        seed: of the weights; same arguments, same bytes.
        layout: whose tensor names and config keys; "transformers" is unquantised and has no draft head.
        experts: how routed experts are stored; "bf16" quantises nothing.
        scale_dtype: of FP8 scales; V4-Flash has e8m0, V4-Flash-Base f32.
        draft_head: default "mtp", or "none" in transformers' layout.
        compress_ratios: one a layer: 0 sliding window, 4 CSA, another ratio HCA.
        hidden_size: model width, a multiple of 32.
        vocab_size: tokens; fewer than 263 leave no room for a tokenizer.
    """
    made = make_tiny_checkpoint(
        folder,
        seed=seed,
        layout=layout,
        experts=experts,
        scale_dtype=scale_dtype,
        draft_head=draft_head,
        compress_ratios=compress_ratios,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
    )
    print(made)


if __name__ == "__main__":
    tyro.cli(main)
