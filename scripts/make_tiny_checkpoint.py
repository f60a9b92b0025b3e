"""Write a small random DeepSeek-V4 checkpoint in a real layout: `python scripts/make_tiny_checkpoint.py FOLDER`."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint

# Large enough that a token's time says something: 13 M parameters beside the draft head's, in V4-Flash's proportions.
BENCH_SIZE: dict[str, object] = {
    "moe_intermediate_size": 192,
    "q_lora_rank": 128,
    "o_lora_rank": 64,
    "head_dim": 64,
    "num_attention_heads": 8,
    "sliding_window": 64,
    "index_n_heads": 16,
    "index_topk": 64,
    "n_routed_experts": 8,
    "num_hash_layers": 3,
    "max_position_embeddings": 16384,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
TINY_RATIOS, BENCH_RATIOS = (0, 4, 128, 4), (0, 0, 4, 128, 4, 128, 4, 128)


def main(
    folder: Annotated[Path, tyro.conf.Positional],
    *,
    seed: int = 0,
    layout: Literal["upstream", "transformers"] = "upstream",
    experts: Literal["fp4", "fp8", "bf16"] = "fp4",
    scale_dtype: Literal["e8m0", "f32"] = "e8m0",
    draft_head: Literal["mtp", "dspark", "none"] | None = None,
    size: Literal["tiny", "bench"] = "tiny",
    compress_ratios: tuple[int, ...] | None = None,
    hidden_size: int | None = None,
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
        size: "bench" has over 10 million parameters, 8 layers and 16,384 positions.
        compress_ratios: one a layer: 0 sliding window, 4 CSA, another ratio HCA; by default 4 layers or the size's 8.
        hidden_size: model width, a multiple of 32; by default 128, or 256.
        vocab_size: tokens; fewer than 263 leave no room for a tokenizer.
    """
    bench = size == "bench"
    made = make_tiny_checkpoint(
        folder,
        seed=seed,
        layout=layout,
        experts=experts,
        scale_dtype=scale_dtype,
        draft_head=draft_head,
        compress_ratios=compress_ratios or (BENCH_RATIOS if bench else TINY_RATIOS),
        hidden_size=hidden_size or (256 if bench else 128),
        vocab_size=vocab_size,
        **(BENCH_SIZE if bench else {}),
    )
    print(made)


if __name__ == "__main__":
    tyro.cli(main)
