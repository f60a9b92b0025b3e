"""A trained demo as a checkpoint in upstream's layout: FP8 linears, FP4 experts, BF16 and F32 for the rest.

V = vocabulary, E = experts
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.safetensors_folder import INDEX_NAME
from compressed_spec.models.deepseek_v4.tiny_tensors import store_fp4, store_fp8
from compressed_spec.training.corpus import BOS_TOKEN, EOS_TOKEN, PROMPT_TEMPLATE
from compressed_spec.training.quantize import is_fp4, is_fp8

_FLOAT32_LEAVES = ("attn_sink", "ape", "gate.bias")


def stored_tensors(model: DeepseekV4) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint under upstream's names, quantised as V4-Flash is."""
    stored: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if is_fp4(name):
            prefix, stack = name.rsplit(".", 1)
            for expert, matrix in enumerate(value):
                leaves = ("w1", "w3") if stack == "w13" else ("w2",)
                for leaf, part in zip(leaves, matrix.chunk(len(leaves)), strict=True):
                    linear = f"{prefix}.{expert}.{leaf}"
                    stored[f"{linear}.weight"], stored[f"{linear}.scale"] = store_fp4(part)
        elif is_fp8(name):
            stored[name], stored[f"{name.removesuffix('.weight')}.scale"] = store_fp8(value, "e8m0")
        elif value.dtype == torch.int64:
            stored[name] = value.clone()
        elif ".hc_" in f".{name}" or name.endswith(_FLOAT32_LEAVES):
            stored[name] = value.to(torch.float32).clone()
        else:
            stored[name] = value.to(torch.bfloat16)
    return stored


def export_checkpoint(model: DeepseekV4, config: Mapping[str, object], tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights, config, tokenizer and prompt template to `folder`, replacing what is there."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in stored_tensors(model).items():
        shards.setdefault("mtp" if name.startswith("mtp.") else "body", {})[name] = tensor.contiguous()
    for old in folder.glob("*.safetensors"):
        old.unlink()
    weight_map: dict[str, str] = {}
    for number, part in enumerate(sorted(shards), start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shards[part], folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shards[part], file)
    total = sum(tensor.nbytes for part in shards.values() for tensor in part.values())
    _write_json(
        folder / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    )
    _write_json(folder / "config.json", config)
    eos, bos = config["eos_token_id"], config["bos_token_id"]
    _write_json(folder / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos, "do_sample": False})
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS_TOKEN,
            "eos_token": EOS_TOKEN,
            "pad_token": EOS_TOKEN,
            "add_bos_token": True,
            "add_eos_token": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": config["max_position_embeddings"],
            "prompt_template": PROMPT_TEMPLATE,
        },
    )
    (folder / "prompt_template.txt").write_text(PROMPT_TEMPLATE, encoding="utf-8")


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
