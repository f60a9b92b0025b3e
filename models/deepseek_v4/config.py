"""DeepSeek-V4 architecture constants, read from config.json in either layout (upstream or transformers).

`parse_config` is the only way in: it refuses whatever it cannot run exactly, naming the key and the remedy.
How a tensor is stored (FP8, FP4, BF16) is not read here; tensor dtypes decide that (see `weight_plan`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from compressed_spec.models.deepseek_v4.json_fields import read_float, read_int, read_list, read_optional_int
from compressed_spec.models.deepseek_v4.layer_schedule import AttentionKind, LayerSpec, parse_layers
from compressed_spec.models.deepseek_v4.rope_config import YarnScaling, parse_rope_dim, parse_theta, parse_yarn

__all__ = ["AttentionKind", "DSparkConfig", "DeepseekV4Config", "LayerSpec", "YarnScaling", "parse_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DSparkConfig:
    """Constants of a DSpark block drafter (the `dspark_*` keys)."""

    block_size: int
    noise_token_id: int
    target_layer_ids: tuple[int, ...]
    markov_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV4Config:
    """Everything the model's shapes and arithmetic depend on; `layers` lists the body layers only."""

    vocab_size: int
    hidden_size: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_lora_rank: int
    o_groups: int
    sliding_window: int
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    moe_intermediate_size: int
    n_routed_experts: int
    n_shared_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    yarn: YarnScaling | None
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    num_nextn_predict_layers: int
    layers: tuple[LayerSpec, ...]
    dspark: DSparkConfig | None

    @property
    def num_hidden_layers(self) -> int:
        return len(self.layers)


def parse_config(raw: Mapping[str, object]) -> DeepseekV4Config:
    """Read a config.json (parsed) of DeepSeek-V4, as upstream ships it or as transformers 5 saves it.

    Optional keys fall back to V4-Flash's values only where a checkpoint cannot mean anything else (`hc_eps`,
    `swiglu_limit`, ...); keys that define the architecture are required.

    Raises:
        ValueError: another architecture, an unsupported option, or a missing, mistyped or contradictory key.
    """
    _refuse_other_models(raw)
    _require_constants(raw)
    vocab_size = read_int(raw, "vocab_size")
    num_layers = read_int(raw, "num_hidden_layers")
    config = DeepseekV4Config(
        vocab_size=vocab_size,
        hidden_size=read_int(raw, "hidden_size"),
        num_attention_heads=read_int(raw, "num_attention_heads"),
        head_dim=read_int(raw, "head_dim"),
        qk_rope_head_dim=parse_rope_dim(raw),
        q_lora_rank=read_int(raw, "q_lora_rank"),
        o_lora_rank=read_int(raw, "o_lora_rank"),
        o_groups=read_int(raw, "o_groups"),
        sliding_window=read_int(raw, "sliding_window"),
        index_n_heads=read_int(raw, "index_n_heads"),
        index_head_dim=read_int(raw, "index_head_dim"),
        index_topk=read_int(raw, "index_topk"),
        moe_intermediate_size=read_int(raw, "moe_intermediate_size"),
        n_routed_experts=read_int(raw, "n_routed_experts"),
        n_shared_experts=read_int(raw, "n_shared_experts", default=1),
        num_experts_per_tok=read_int(raw, "num_experts_per_tok"),
        routed_scaling_factor=read_float(raw, "routed_scaling_factor"),
        swiglu_limit=read_float(raw, "swiglu_limit", default=10.0),
        hc_mult=read_int(raw, "hc_mult"),
        hc_sinkhorn_iters=read_int(raw, "hc_sinkhorn_iters", default=20),
        hc_eps=read_float(raw, "hc_eps", default=1e-6),
        rms_norm_eps=read_float(raw, "rms_norm_eps", default=1e-6),
        rope_theta=parse_theta(raw, "rope_theta", "main"),
        compress_rope_theta=parse_theta(raw, "compress_rope_theta", "compress"),
        yarn=parse_yarn(raw),
        max_position_embeddings=read_int(raw, "max_position_embeddings"),
        bos_token_id=_token_id(raw, "bos_token_id", vocab_size),
        eos_token_ids=_eos_token_ids(raw, vocab_size),
        num_nextn_predict_layers=read_int(raw, "num_nextn_predict_layers", default=0, minimum=0),
        layers=parse_layers(raw, num_layers),
        dspark=_dspark(raw, num_layers, vocab_size),
    )
    _check_shapes(config)
    return config


def _refuse_other_models(raw: Mapping[str, object]) -> None:
    model_type = raw.get("model_type")
    if model_type in ("deepseek_v41", "deepseek_v41_text"):
        raise ValueError(
            f"model_type is {model_type!r}: DeepSeek-V4.1 is a different architecture (shared KV sources, engram, "
            "vision), use a checkpoint whose model_type is 'deepseek_v4'"
        )
    if model_type != "deepseek_v4":
        raise ValueError(f"model_type is {model_type!r}: only 'deepseek_v4' checkpoints can be run")


def _require_constants(raw: Mapping[str, object]) -> None:
    """Options that exist in the file format but of which only one value is implemented."""
    constants: dict[str, object] = {
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "num_key_value_heads": 1,
        "n_shared_experts": 1,
    }
    for key, only in constants.items():
        value = raw.get(key, only)
        if type(value) is not type(only) or value != only:
            raise ValueError(f"{key} is {value!r}: only {only!r} is supported for DeepSeek-V4, correct config.json")


def _check_shapes(config: DeepseekV4Config) -> None:
    heads, groups = config.num_attention_heads, config.o_groups
    if heads % groups:
        raise ValueError(f"o_groups is {groups}, which must divide num_attention_heads = {heads}")
    for key, size in (("head_dim", config.head_dim), ("index_head_dim", config.index_head_dim)):
        if config.qk_rope_head_dim > size:
            raise ValueError(f"qk_rope_head_dim is {config.qk_rope_head_dim}, which must not exceed {key} = {size}")
    if config.qk_rope_head_dim % 2:
        raise ValueError(f"qk_rope_head_dim is {config.qk_rope_head_dim}, which must be even: RoPE rotates pairs")
    if config.num_experts_per_tok > config.n_routed_experts:
        raise ValueError(
            f"num_experts_per_tok is {config.num_experts_per_tok}, which must not exceed "
            f"n_routed_experts = {config.n_routed_experts}"
        )


def _token_id(raw: Mapping[str, object], key: str, vocab_size: int) -> int | None:
    value = read_optional_int(raw, key, minimum=0)
    if value is not None and value >= vocab_size:
        raise ValueError(f"{key} is {value}, which must be below vocab_size = {vocab_size}")
    return value


def _eos_token_ids(raw: Mapping[str, object], vocab_size: int) -> tuple[int, ...]:
    value = raw.get("eos_token_id")
    values = value if isinstance(value, list | tuple) else [value] if value is not None else []
    ids = (_token_id({"eos_token_id": item}, "eos_token_id", vocab_size) for item in values)
    return tuple(dict.fromkeys(item for item in ids if item is not None))


def _dspark(raw: Mapping[str, object], num_layers: int, vocab_size: int) -> DSparkConfig | None:
    keys = ("dspark_block_size", "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_markov_rank")
    present = [key for key in keys if raw.get(key) is not None]
    if not present:
        return None
    for key in keys:
        if key not in present:
            raise ValueError(f"{key} is missing from config.json though {present[0]} is there: add it or drop them all")
    noise = _token_id(raw, "dspark_noise_token_id", vocab_size)
    layer_ids = [i for i in read_list(raw, "dspark_target_layer_ids") or () if type(i) is int and 0 <= i < num_layers]
    if noise is None or not layer_ids or list(layer_ids) != list(read_list(raw, "dspark_target_layer_ids") or ()):
        raise ValueError(
            f"dspark_target_layer_ids is {raw['dspark_target_layer_ids']!r}: use a list of layer ids below {num_layers}"
        )
    return DSparkConfig(
        block_size=read_int(raw, "dspark_block_size"),
        noise_token_id=noise,
        target_layer_ids=tuple(layer_ids),
        markov_rank=read_int(raw, "dspark_markov_rank"),
    )
