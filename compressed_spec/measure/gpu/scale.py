"""How large everything is: V4-Flash's own dimensions, or small enough for Triton's interpreter on a CPU."""

from dataclasses import dataclass
from typing import Any

import torch

# config.json of V4-Flash, without the layers.
FLASH: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 129280,
    "hidden_size": 4096,
    "moe_intermediate_size": 2048,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 64,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 1024,
    "o_lora_rank": 1024,
    "o_groups": 8,
    "sliding_window": 128,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "index_topk": 512,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "max_position_embeddings": 1048576,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "head_dim": 32,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_lora_rank": 16,
    "o_groups": 2,
    "sliding_window": 8,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 4,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "num_hash_layers": 1,
    "hc_sinkhorn_iters": 3,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """raw: config.json of the model that steps are timed on. context: committed tokens of every row. dtype: of
    activations. oracle_ratios: layers to compare with transformers'.
    """

    raw: dict[str, Any]
    ratios: tuple[int, ...]
    oracle_ratios: tuple[int, ...]
    dtype: torch.dtype
    context: int
    tree_sizes: tuple[int, ...]
    batches: tuple[int, ...]
    copy_bytes: int

    def config(self, ratios: tuple[int, ...]) -> dict[str, Any]:
        """config.json of so many layers."""
        return self.raw | {"compress_ratios": [*ratios, 0], "num_hidden_layers": len(ratios)}


def full_scale() -> Scale:
    """V4-Flash's first eight layers: two sliding, three CSA, three HCA."""
    return Scale(
        raw=FLASH,
        ratios=(0, 0, 4, 128, 4, 128, 4, 128),
        oracle_ratios=(0, 4, 128),
        dtype=torch.bfloat16,
        context=8192,
        tree_sizes=(1, 2, 4, 8, 16),
        batches=(1, 4, 16, 64),
        copy_bytes=2**31,
    )


def dry_scale() -> Scale:
    """The same run in a minute without a GPU, in float32: the interpreter's bfloat16 products are wrong."""
    return Scale(
        raw=FLASH | _TINY,
        ratios=(0, 4, 128),
        oracle_ratios=(0, 4, 128),
        dtype=torch.float32,
        context=40,
        tree_sizes=(1, 4),
        batches=(1, 2),
        copy_bytes=2**20,
    )
