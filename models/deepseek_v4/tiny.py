"""Small random checkpoints in the real layouts and dtypes, for tests and demonstrations; same arguments, same bytes.

The weights are random but not featureless: the head favours one successor of each token and the draft head mostly
sees the token before it, so greedy text wanders and drafts are right some of the time.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save_file

from compressed_spec.models.deepseek_v4.config import AttentionKind, DeepseekV4Config, parse_config
from compressed_spec.models.deepseek_v4.names import (
    DraftHeadKind,
    Layout,
    Shape,
    expected_parameters,
    transformers_name,
)
from compressed_spec.models.deepseek_v4.safetensors_folder import INDEX_NAME
from compressed_spec.models.deepseek_v4.tiny_tensors import ScaleDtype, random_tensor, store_fp4, store_fp8
from compressed_spec.models.deepseek_v4.tiny_tokenizer import write_tokenizer

NUM_DSPARK_STAGES = 3
_FP8_LINEARS = (
    *(f".attn.{name}.weight" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b")),
    *(f".shared_experts.{name}.weight" for name in ("w1", "w2", "w3")),
    *(f"mtp.0.{name}.weight" for name in ("e_proj", "h_proj", "main_proj")),
)
_TRANSFORMERS_KEYS = ("layer_types", "mlp_layer_types", "compress_rates", "partial_rotary_factor", "rope_parameters")
_FLOAT32_LEAVES = ("attn_sink", "ape", "gate.bias")


def make_tiny_checkpoint(
    folder: Path | str,
    *,
    seed: int = 0,
    layout: Literal["upstream", "transformers"] = "upstream",
    experts: Literal["fp4", "fp8", "bf16"] = "fp4",
    scale_dtype: ScaleDtype = "e8m0",
    draft_head: Literal["mtp", "dspark", "none"] | None = None,
    compress_ratios: tuple[int, ...] = (0, 4, 128, 4),
    **overrides: object,
) -> Path:
    """Write config, tokenizer, generation config, sharded weights and their index to `folder`, and return it.

    Args:
        layout: whose names and config keys; "transformers" is always unquantised and has no draft head.
        experts: as V4-Flash ("fp4"), V4-Flash-Base ("fp8"), or nothing quantised at all ("bf16").
        scale_dtype: of the FP8 scales, and of all scales; V4-Flash-Base has "f32".
        draft_head: default "mtp", or "none" in transformers' layout.
        compress_ratios: one a layer, upstream's meaning: 0 sliding, 4 CSA, else HCA.
        overrides: config.json keys in place of the defaults; None drops a key.

    Raises:
        ValueError: the config is refused (see `parse_config`), or a combination that no checkpoint has.
    """
    transformers = Layout(layout) is Layout.TRANSFORMERS
    head = DraftHeadKind(draft_head or ("none" if transformers else "mtp"))
    if transformers and head is not DraftHeadKind.NONE:
        raise ValueError("draft_head must be 'none' in transformers' layout, which has no draft heads")
    late = {key: overrides.pop(key) for key in _TRANSFORMERS_KEYS if transformers and key in overrides}
    raw = _upstream_config(compress_ratios, head, experts, scale_dtype) | overrides
    raw = {key: value for key, value in raw.items() if value is not None}
    if transformers:
        raw = _transformers_config(raw) | late
    config = parse_config(raw)
    shapes = expected_parameters(config, head, NUM_DSPARK_STAGES)

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", raw)
    generation = {"bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids), "do_sample": True}
    _write_json(folder / "generation_config.json", generation)
    write_tokenizer(folder, config.vocab_size)
    quantization = "bf16" if transformers else experts
    shards = {
        shard: _stored_tensors(names, shapes, config, seed, transformers, quantization, scale_dtype)
        for shard, names in _shards(shapes).items()
    }
    _write_shards(folder, list(shards.values()))
    return folder


def _upstream_config(
    compress_ratios: tuple[int, ...], head: DraftHeadKind, experts: str, scale_dtype: ScaleDtype
) -> dict[str, object]:
    num_draft_layers = {DraftHeadKind.MTP: 1, DraftHeadKind.DSPARK: NUM_DSPARK_STAGES, DraftHeadKind.NONE: 0}[head]
    raw: dict[str, object] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": 384,
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "num_hidden_layers": len(compress_ratios),
        "num_nextn_predict_layers": min(num_draft_layers, 1),
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 16,
        "q_lora_rank": 64,
        "o_lora_rank": 32,
        "o_groups": 2,
        "sliding_window": 16,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 16,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "num_hash_layers": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 8,
            "original_max_position_embeddings": 1024,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
        "expert_dtype": experts,
        "compress_ratios": [*compress_ratios, *[0] * num_draft_layers],
    }
    if experts != "bf16":
        raw["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "scale_fmt": "ue8m0" if scale_dtype == "e8m0" else "float",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        }
    if head is DraftHeadKind.DSPARK:
        last = len(compress_ratios) - 1
        raw["dspark_block_size"] = 5
        raw["dspark_noise_token_id"] = 2
        raw["dspark_target_layer_ids"] = list(range(max(0, last - 2), last + 1))
        raw["dspark_markov_rank"] = 16
    return raw


def _transformers_config(upstream: Mapping[str, object]) -> dict[str, object]:
    """The same model as transformers 5 spells it."""
    config = parse_config(upstream)
    raw = dict(upstream)
    for key in ("compress_ratios", "num_hash_layers", "rope_scaling", "expert_dtype", "quantization_config"):
        raw.pop(key, None)
    factor = config.qk_rope_head_dim / config.head_dim
    compress: dict[str, object] = {"rope_type": "default"}
    if config.yarn is not None:
        compress = {"rope_type": "yarn", "attention_factor": 1.0, **dataclasses.asdict(config.yarn)}
    rates = {layer.kind.value: layer.ratio for layer in config.layers if layer.kind is not AttentionKind.SLIDING}
    if any(layer.ratio != rates.get(layer.kind.value, 0) for layer in config.layers):
        raise ValueError("compress_ratios has two different HCA ratios: transformers' layout has one rate for all")
    raw["layer_types"] = [layer.kind.value for layer in config.layers]
    raw["mlp_layer_types"] = ["hash_moe" if layer.hash_routed else "moe" for layer in config.layers]
    raw["compress_rates"] = rates
    raw["partial_rotary_factor"] = factor
    raw["rope_parameters"] = {
        "main": {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": factor},
        "compress": {**compress, "rope_theta": config.compress_rope_theta, "partial_rotary_factor": factor},
    }
    return raw


def _shards(shapes: Mapping[str, Shape]) -> dict[str, list[str]]:
    """Parameters by file: embedding, one a layer, the rest, one a draft layer; upstream's own order."""
    groups: dict[str, list[str]] = {}
    for name in shapes:
        part = name.split(".")
        group = "0" if part[0] == "embed" else f"{part[0]}.{int(part[1]):04d}" if part[0] in ("layers", "mtp") else "m"
        groups.setdefault(group, []).append(name)
    return {group: groups[group] for group in sorted(groups)}


def _stored_tensors(
    names: list[str],
    shapes: Mapping[str, Shape],
    config: DeepseekV4Config,
    seed: int,
    transformers: bool,
    experts: str,
    scale_dtype: ScaleDtype,
) -> dict[str, torch.Tensor]:
    stored: dict[str, torch.Tensor] = {}
    for parameter in names:
        value = random_tensor(parameter, shapes[parameter], config, seed)
        stacked = parameter.endswith((".experts.w13", ".experts.w2"))
        if transformers:
            name = transformers_name(f"{parameter}.weight" if stacked else parameter)
            stored[name] = value.to(_plain_dtype(parameter, value))
        elif stacked:
            prefix, stack = parameter.rsplit(".", 1)
            for e, matrix in enumerate(value):
                parts = dict(zip(("w1", "w3"), matrix.chunk(2), strict=True)) if stack == "w13" else {"w2": matrix}
                for leaf, part in parts.items():
                    linear = f"{prefix}.{e}.{leaf}"
                    if experts == "fp4":
                        stored[f"{linear}.weight"], stored[f"{linear}.scale"] = store_fp4(part)
                    elif experts == "fp8":
                        stored[f"{linear}.weight"], stored[f"{linear}.scale"] = store_fp8(part, scale_dtype)
                    else:
                        stored[f"{linear}.weight"] = part.to(torch.bfloat16).contiguous()
        elif experts != "bf16" and parameter.endswith(_FP8_LINEARS):
            scale_name = f"{parameter.removesuffix('.weight')}.scale"
            stored[parameter], stored[scale_name] = store_fp8(value, scale_dtype)
        else:
            stored[parameter] = value.to(_plain_dtype(parameter, value))
    return stored


def _plain_dtype(parameter: str, value: torch.Tensor) -> torch.dtype:
    if value.dtype == torch.int64:
        return torch.int64
    if ".hc_" in f".{parameter}" or parameter.endswith(_FLOAT32_LEAVES):
        return torch.float32
    return torch.bfloat16


def _write_shards(folder: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    weight_map: dict[str, str] = {}
    total = 0
    for i, tensors in enumerate(shards, start=1):
        file = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(tensor.nbytes for tensor in tensors.values())
    _write_json(
        folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
