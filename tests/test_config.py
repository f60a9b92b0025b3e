"""config.json of DeepSeek-V4: both layouts give the same constants, and whatever is wrong is refused by name."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import DeepseekV4Config as TransformersConfig

from compressed_spec.models.deepseek_v4.config import AttentionKind, LayerSpec, YarnScaling, parse_config

FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": 0,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "compress_rope_theta": 160000,
    "eos_token_id": 1,
    "expert_dtype": "fp4",
    "hc_eps": 1e-06,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 512,
    "max_position_embeddings": 1048576,
    "model_type": "deepseek_v4",
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_hidden_layers": 43,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "q_lora_rank": 1024,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.5,
    "scoring_func": "sqrtsoftplus",
    "sliding_window": 128,
    "swiglu_limit": 10.0,
    "tie_word_embeddings": False,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}
DSPARK = {
    "dspark_block_size": 5,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}


def changed(**changes: object) -> dict[str, Any]:
    """FLASH with some keys replaced; None drops a key."""
    return {key: value for key, value in {**FLASH, **changes}.items() if value is not None}


def without(raw: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in keys}


def test_upstream_flash() -> None:
    config = parse_config(FLASH)
    assert config.num_hidden_layers == 43
    assert config.layers[0] == LayerSpec(kind=AttentionKind.SLIDING, ratio=0, hash_routed=True)
    assert config.layers[2] == LayerSpec(kind=AttentionKind.CSA, ratio=4, hash_routed=True)
    assert config.layers[3] == LayerSpec(kind=AttentionKind.HCA, ratio=128, hash_routed=False)
    assert [layer.kind for layer in config.layers].count(AttentionKind.CSA) == 21
    assert config.yarn == YarnScaling(
        factor=16.0, original_max_position_embeddings=65536, beta_fast=32.0, beta_slow=1.0
    )
    assert (config.rope_theta, config.compress_rope_theta, config.qk_rope_head_dim) == (10000.0, 160000.0, 64)
    assert (config.bos_token_id, config.eos_token_ids, config.dspark) == (0, (1,), None)


def test_upstream_pro_starts_with_hca() -> None:
    config = parse_config(changed(num_hidden_layers=61, compress_ratios=[128, 128, *[4, 128] * 29, 4, 0], o_groups=16))
    assert config.layers[0] == LayerSpec(kind=AttentionKind.HCA, ratio=128, hash_routed=True)
    assert {layer.kind for layer in config.layers} == {AttentionKind.CSA, AttentionKind.HCA}


def test_draft_layer_ratios_may_be_absent() -> None:
    assert parse_config(changed(compress_ratios=FLASH["compress_ratios"][:43])) == parse_config(FLASH)


def test_dspark_keys() -> None:
    config = parse_config(changed(**DSPARK, compress_ratios=[*FLASH["compress_ratios"], 0, 0]))
    assert config.dspark is not None
    assert (config.dspark.block_size, config.dspark.target_layer_ids) == (5, (40, 41, 42))
    assert (config.dspark.noise_token_id, config.dspark.markov_rank) == (128799, 256)


def test_flat_scaling_may_repeat_the_main_theta() -> None:
    """What transformers makes of `rope_scaling` before it nests it."""
    flat = {**FLASH["rope_scaling"], "rope_theta": 10000.0}
    assert parse_config(changed(rope_scaling=flat)) == parse_config(FLASH)
    assert parse_config(changed(rope_scaling=None, rope_parameters=flat)) == parse_config(FLASH)


@pytest.mark.parametrize("scaling", [FLASH["rope_scaling"], None])
def test_transformers_writes_what_we_read(scaling: dict[str, Any] | None, tmp_path: Path) -> None:
    """`to_dict` and `save_pretrained` of transformers say the same as the upstream file they came from."""
    raw = changed(rope_scaling=scaling)
    theirs = TransformersConfig(**copy.deepcopy(raw))  # it writes into nested dicts
    theirs.save_pretrained(tmp_path)
    assert parse_config(theirs.to_dict()) == parse_config(raw)
    assert parse_config(json.loads((tmp_path / "config.json").read_text())) == parse_config(raw)


def test_transformers_rates_are_free() -> None:
    rates = {AttentionKind.CSA.value: 2, AttentionKind.HCA.value: 16}
    types = [kind.value for kind in (AttentionKind.CSA, AttentionKind.HCA, AttentionKind.SLIDING)]
    raw = TransformersConfig(
        **copy.deepcopy(changed(compress_ratios=None, num_hidden_layers=3, layer_types=types, compress_rates=rates))
    ).to_dict()
    assert [layer.ratio for layer in parse_config(raw).layers] == [2, 16, 0]
    older = without(raw, "compress_rates") | {"compress_rate_csa": 2, "compress_rate_hca": 16}
    assert parse_config(older) == parse_config(raw)


def test_transformers_mlp_layer_types_are_free() -> None:
    raw = TransformersConfig(**copy.deepcopy(FLASH)).to_dict()
    raw["mlp_layer_types"] = ["moe"] * 42 + ["hash_moe"]
    assert [i for i, layer in enumerate(parse_config(raw).layers) if layer.hash_routed] == [42]


def test_both_schedules_may_agree() -> None:
    types = [layer.kind.value for layer in parse_config(FLASH).layers]
    assert parse_config(changed(layer_types=types)) == parse_config(FLASH)


def test_eos_list_and_absent_tokens() -> None:
    config = parse_config(changed(eos_token_id=[1, 7, 1], bos_token_id=None))
    assert (config.bos_token_id, config.eos_token_ids) == (None, (1, 7))
    assert parse_config(changed(eos_token_id=None)).eos_token_ids == ()


HARMLESS = {
    "hc_eps",
    "hc_sinkhorn_iters",
    "rms_norm_eps",
    "swiglu_limit",
    "n_shared_experts",
    "num_nextn_predict_layers",
    "num_key_value_heads",
    "bos_token_id",
    "eos_token_id",
    "expert_dtype",
    "architectures",
    "attention_bias",
    "hidden_act",
    "scoring_func",
    "topk_method",
    "norm_topk_prob",
    "tie_word_embeddings",
}


@pytest.mark.parametrize("key", sorted(HARMLESS - {"num_nextn_predict_layers", "bos_token_id", "eos_token_id"}))
def test_optional_keys_have_flash_values(key: str) -> None:
    assert parse_config(without(FLASH, key)) == parse_config(FLASH)


@pytest.mark.parametrize("key", sorted(FLASH.keys() - HARMLESS - {"rope_scaling"}))
def test_required_keys_are_named(key: str) -> None:
    with pytest.raises(ValueError, match=key):
        parse_config(without(FLASH, key))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "deepseek_v3"}, "'deepseek_v3': only 'deepseek_v4'"),
        ({"model_type": "deepseek_v41"}, "V4.1 is a different architecture"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"topk_method": "greedy"}, "topk_method"),
        ({"norm_topk_prob": False}, "norm_topk_prob"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_bias": True}, "attention_bias"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"num_key_value_heads": True}, "num_key_value_heads"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"o_groups": 7}, "o_groups is 7, which must divide"),
        ({"qk_rope_head_dim": 63}, "must be even"),
        ({"qk_rope_head_dim": 256}, "must not exceed index_head_dim"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok is 257"),
        ({"hidden_size": 0}, "hidden_size is 0"),
        ({"hidden_size": -4096}, "hidden_size"),
        ({"hidden_size": True}, "hidden_size is True"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'"),
        ({"hidden_size": 4096.0}, "hidden_size is 4096.0"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"hc_eps": "1e-6"}, "hc_eps"),
        ({"rms_norm_eps": False}, "rms_norm_eps"),
        ({"num_hash_layers": -1}, "num_hash_layers"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
        ({"eos_token_id": 129280}, "eos_token_id is 129280, which must be below vocab_size"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id is '2'"),
        ({"bos_token_id": -1}, "bos_token_id"),
        ({"compress_ratios": [0] * 42}, "compress_ratios has 42 entries"),
        ({"compress_ratios": [0] * 43 + [4]}, r"compress_ratios\[43\] is 4 but belongs to a draft layer"),
        ({"compress_ratios": [-1] + [0] * 42}, r"compress_ratios\[0\]"),
        ({"compress_ratios": [True] + [0] * 42}, r"compress_ratios\[0\]"),
        ({"compress_ratios": 4}, "compress_ratios is 4"),
        ({"layer_types": ["sliding_attention"] * 43}, r"layer_types\[2\].*compress_ratios\[2\]"),
        ({"layer_types": ["sliding_attention"] * 42}, "layer_types has 42 entries"),
        ({"layer_types": ["full_attention"] * 43}, r"layer_types\[0\] is 'full_attention'"),
        ({"compress_rates": {"heavily_compressed_attention": 64}}, r"compress_ratios\[3\] is 128 but compress_rates"),
        ({"compress_rates": {"compressed_sparse_attention": 0}}, "compressed_sparse_attention is 0"),
        ({"compress_rates": [4, 128]}, "compress_rates"),
        (
            {"compress_rates": {"compressed_sparse_attention": 4}, "compress_rate_csa": 8},
            "compress_rate_csa is 8: drop one",
        ),
        ({"mlp_layer_types": ["moe"] * 43}, "num_hash_layers is 3 but mlp_layer_types"),
        ({"mlp_layer_types": ["dense"] * 43}, r"mlp_layer_types\[0\] is 'dense'"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "'linear': only 'yarn'"),
        ({"rope_scaling": {**FLASH["rope_scaling"], "rope_type": "default"}}, "drop one"),
        ({"rope_scaling": {**FLASH["rope_scaling"], "rope_theta": 7}}, "rope_theta is 10000 but"),
        ({"rope_scaling": {"type": "yarn", "factor": 16}}, "original_max_position_embeddings is missing"),
        ({"rope_scaling": {**FLASH["rope_scaling"], "attention_factor": 1.2}}, "attention_factor 1.2"),
        ({"rope_scaling": {**FLASH["rope_scaling"], "truncate": False}}, "truncate False"),
        ({"rope_parameters": {"main": {}, "compress": {}}}, "drop rope_scaling"),
        (
            {"rope_scaling": None, "rope_parameters": {"main": {"rope_type": "yarn"}, "compress": {}}},
            "sliding-window layers support 'default' only",
        ),
        (
            {"rope_scaling": None, "rope_parameters": {"main": {"rope_theta": 5}, "compress": {}}},
            "rope_theta is 10000 but rope_parameters",
        ),
        ({**DSPARK, "dspark_markov_rank": None}, "dspark_markov_rank is missing"),
        ({**DSPARK, "dspark_target_layer_ids": [43]}, "dspark_target_layer_ids"),
        ({**DSPARK, "dspark_target_layer_ids": []}, "dspark_target_layer_ids"),
        ({**DSPARK, "dspark_noise_token_id": 129280}, "dspark_noise_token_id"),
        ({**DSPARK, "dspark_block_size": 0}, "dspark_block_size"),
    ],
)
def test_refusals_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        parse_config(changed(**changes))
    assert "\n" not in str(refusal.value)


def test_layer_types_need_their_rates() -> None:
    types = [layer.kind.value for layer in parse_config(FLASH).layers]
    with pytest.raises(ValueError, match="compress_rates has no 'compressed_sparse_attention'"):
        parse_config(changed(compress_ratios=None, layer_types=types))
