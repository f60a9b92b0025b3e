"""The demo's architecture and hyperparameters, and its initial weights."""

import math
from dataclasses import dataclass, field, replace

import torch

from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.training.losses import LossWeights

VOCAB_SIZE = 2048


def demo_config() -> dict[str, object]:
    """config.json of the demo: every part of DeepSeek-V4, thin. 8 layers, 16384 positions, YaRN from 4096."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 128,
        "moe_intermediate_size": 192,
        "num_hidden_layers": 8,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 96,
        "o_lora_rank": 64,
        "o_groups": 2,
        "sliding_window": 64,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 32,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "num_hash_layers": 3,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "hc_mult": 4,
        "hc_sinkhorn_iters": 8,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "max_position_embeddings": 16384,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
        "expert_dtype": "fp4",
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 128, 0],
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Hyperparameters. Shares are of the whole run, 0 to 1, by time or by steps.

    rows, length: one micro batch. micro_batches: gradients added up for one update, from share `grow_from` on; one
    before. warmup, decay: shares with a rising and a falling learning rate. select_from: where the indexers' choice
    begins to count. chain_from: where draft steps beyond the first begin (in every other step; an early exit is trained
    in the others). dropout: largest share of steps in which the last layer is dropped (rising linearly with depth),
    until dropout_until. quantize_from: where the forward begins to read FP4 and FP8 weights.
    """

    rows: int = 4
    length: int = 512
    micro_batches: int = 2
    grow_from: float = 0.8
    seed: int = 0
    lr: float = 0.006
    adam_lr: float = 0.004
    weight_decay: float = 0.1
    warmup: float = 0.02
    decay: float = 0.5
    prompt_weight: float = 0.4
    balance_rate: float = 0.003
    select_from: float = 0.3
    chain_from: float = 0.12
    dropout: float = 0.1
    dropout_until: float = 0.7
    quantize_from: float = 0.85
    losses: LossWeights = field(default_factory=LossWeights)

    def polishing(self, number: int) -> "Recipe":
        """For the `number`-th short run over own texts: weights as stored, small steps, nothing left out."""
        return replace(
            self,
            seed=self.seed + number,
            lr=self.lr / 5,
            adam_lr=self.adam_lr / 5,
            decay=1.0,
            warmup=0.05,
            grow_from=0.0,
            select_from=0.0,
            chain_from=0.0,
            dropout=0.0,
            quantize_from=0.0,
        )

    def factor(self, share: float) -> float:
        """Learning rate at a share of the run, relative to its peak: up, level, down to nothing."""
        rising = min(1.0, (share + 1e-3) / self.warmup) if self.warmup else 1.0
        return rising * max(0.0, min(1.0, (1.0 - share) / self.decay))


def initialize(model: DeepseekV4, seed: int) -> None:
    """Initial weights in place: blocks start as nearly the identity, streams keep most of themselves."""
    random = torch.Generator().manual_seed(seed)
    config, m = model.config, model.config.hc_mult
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
            noise = torch.randn(parameter.shape, generator=random)
            if "norm" in leaf:
                parameter.fill_(1.0)
            elif leaf in ("attn_sink", "bias", "ape"):
                parameter.zero_()
            elif leaf.endswith("_fn"):
                parameter.copy_(0.01 * noise)
            elif leaf.endswith("_scale"):
                parameter.fill_(0.5)
            elif leaf.endswith("_base"):
                parameter.copy_(0.3 * noise)
                if leaf != "hc_head_base":
                    parameter[2 * m :].add_(2.0 * torch.eye(m).flatten())
            elif leaf in ("wo_b", "w2"):
                parameter.copy_(0.1 * noise / math.sqrt(parameter.shape[-1]))
            elif leaf in ("embed", "head"):
                parameter.copy_((0.5 if leaf == "embed" else 0.01) * noise)
            else:
                parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
        for name, buffer in model.named_buffers():
            if name.endswith("tid2eid"):
                scores_VE = torch.rand(buffer.shape[0], config.n_routed_experts, generator=random)
                buffer.copy_(scores_VE.argsort(dim=1)[:, : buffer.shape[1]])
