"""Names and shapes of the model's parameters, as the config implies them, and the names checkpoints give them.

The model keeps upstream's tensor names, except that a layer's routed experts are stacked: `ffn.experts.w13`
[E, 2I, D] (w1 = gate first, then w3 = up) and `ffn.experts.w2` [E, D, I].
Shapes: V vocabulary, D hidden size, M residual streams, E routed experts, I expert width, H heads, G output groups.
"""

import re
from enum import StrEnum

from compressed_spec.models.deepseek_v4.config import AttentionKind, DeepseekV4Config, DSparkConfig, LayerSpec

Shape = tuple[int, ...]

# Tensors that a checkpoint may hold and the model does not take: V4-Flash-Base repeats embed and head inside its
# MTP layer, and upstream's own conversion drops both copies.
IGNORED_COPIES = frozenset({"mtp.0.emb.tok_emb.weight", "mtp.0.head.weight"})

# Of every block of a draft head.
DRAFT_LAYER = LayerSpec(kind=AttentionKind.SLIDING, ratio=0, hash_routed=False)


class DraftHeadKind(StrEnum):
    """Which draft head a checkpoint carries; told by its tensors, because config.json does not say."""

    MTP = "mtp"
    DSPARK = "dspark"
    NONE = "none"


class Layout(StrEnum):
    """Whose tensor names a checkpoint uses."""

    UPSTREAM = "upstream"
    TRANSFORMERS = "transformers"


def require_dspark(config: DeepseekV4Config) -> DSparkConfig:
    """The constants of a DSpark head; raises ValueError if config.json has none."""
    if config.dspark is None:
        raise ValueError("config.json lacks the dspark_* keys of the DSpark head that the weights hold: add them")
    return config.dspark


def expected_parameters(
    config: DeepseekV4Config, draft_head: DraftHeadKind, num_draft_layers: int = 1
) -> dict[str, Shape]:
    """Every parameter and persistent buffer of the model, name to shape.

    num_draft_layers: blocks of a DSPARK head (an MTP head is one). Raises ValueError for such a head without the
    dspark_* keys in the config.
    """
    v, d = config.vocab_size, config.hidden_size
    shapes: dict[str, Shape] = {"embed.weight": (v, d)}
    for i, layer in enumerate(config.layers):
        shapes |= {f"layers.{i}.{name}": shape for name, shape in _block(config, layer).items()}
    shapes |= _head(config)
    shapes["head.weight"] = (v, d)
    if draft_head is DraftHeadKind.MTP:
        block = _block(config, DRAFT_LAYER)
        block |= {f"{name}.weight": (d, d) for name in ("e_proj", "h_proj")}
        block |= {f"{name}.weight": (d,) for name in ("enorm", "hnorm")}
        shapes |= {f"mtp.0.{name}": shape for name, shape in {**block, **_head(config)}.items()}
    if draft_head is DraftHeadKind.DSPARK:
        shapes |= _dspark(config, num_draft_layers)
    return shapes


def _dspark(config: DeepseekV4Config, num_stages: int) -> dict[str, Shape]:
    dspark = require_dspark(config)
    v, d, rank = config.vocab_size, config.hidden_size, dspark.markov_rank
    shapes: dict[str, Shape] = {}
    for stage in range(num_stages):
        block = _block(config, DRAFT_LAYER)
        if stage == 0:
            block |= {"main_proj.weight": (d, d * len(dspark.target_layer_ids)), "main_norm.weight": (d,)}
        if stage == num_stages - 1:
            block |= _head(config)
            block |= {f"markov_head.{name}.weight": (v, rank) for name in ("markov_w1", "markov_w2")}
            block["confidence_head.proj.weight"] = (1, d + rank)
        shapes |= {f"mtp.{stage}.{name}": shape for name, shape in block.items()}
    return shapes


def _head(config: DeepseekV4Config) -> dict[str, Shape]:
    """What merges the M streams before the vocabulary head."""
    d, m = config.hidden_size, config.hc_mult
    return {"hc_head_fn": (m, m * d), "hc_head_base": (m,), "hc_head_scale": (1,), "norm.weight": (d,)}


def _block(config: DeepseekV4Config, layer: LayerSpec) -> dict[str, Shape]:
    d, m = config.hidden_size, config.hc_mult
    mixes = (2 + m) * m  # pre, post and the M x M combination
    shapes: dict[str, Shape] = {"attn_norm.weight": (d,), "ffn_norm.weight": (d,)}
    for part in ("attn", "ffn"):
        shapes |= {f"hc_{part}_fn": (mixes, m * d), f"hc_{part}_base": (mixes,), f"hc_{part}_scale": (3,)}
    shapes |= {f"attn.{name}": shape for name, shape in _attention(config, layer).items()}
    shapes |= {f"ffn.{name}": shape for name, shape in _experts(config, layer).items()}
    return shapes


def _attention(config: DeepseekV4Config, layer: LayerSpec) -> dict[str, Shape]:
    d, h, hd, g = config.hidden_size, config.num_attention_heads, config.head_dim, config.o_groups
    shapes: dict[str, Shape] = {
        "attn_sink": (h,),
        "wq_a.weight": (config.q_lora_rank, d),
        "q_norm.weight": (config.q_lora_rank,),
        "wq_b.weight": (h * hd, config.q_lora_rank),
        "wkv.weight": (hd, d),
        "kv_norm.weight": (hd,),
        "wo_a.weight": (g * config.o_lora_rank, h // g * hd),
        "wo_b.weight": (d, g * config.o_lora_rank),
    }
    if layer.kind is not AttentionKind.SLIDING:
        shapes |= {f"compressor.{name}": shape for name, shape in _compressor(config, layer, hd).items()}
    if layer.kind is AttentionKind.CSA:
        hi, di = config.index_n_heads, config.index_head_dim
        shapes["indexer.wq_b.weight"] = (hi * di, config.q_lora_rank)
        shapes["indexer.weights_proj.weight"] = (hi, d)
        shapes |= {f"indexer.compressor.{name}": shape for name, shape in _compressor(config, layer, di).items()}
    return shapes


def _compressor(config: DeepseekV4Config, layer: LayerSpec, dim: int) -> dict[str, Shape]:
    wide = 2 * dim if layer.kind is AttentionKind.CSA else dim  # CSA windows overlap: two halves of channels
    return {
        "ape": (layer.ratio, wide),
        "wkv.weight": (wide, config.hidden_size),
        "wgate.weight": (wide, config.hidden_size),
        "norm.weight": (dim,),
    }


def _experts(config: DeepseekV4Config, layer: LayerSpec) -> dict[str, Shape]:
    d, e, i = config.hidden_size, config.n_routed_experts, config.moe_intermediate_size
    shapes: dict[str, Shape] = {"gate.weight": (e, d)}
    if layer.hash_routed:
        shapes["gate.tid2eid"] = (config.vocab_size, config.num_experts_per_tok)
    else:
        shapes["gate.bias"] = (e,)
    shapes |= {
        "shared_experts.w1.weight": (i, d),
        "shared_experts.w2.weight": (d, i),
        "shared_experts.w3.weight": (i, d),
    }
    shapes |= {"experts.w13": (e, 2 * i, d), "experts.w2": (e, d, i)}
    return shapes


# transformers' names, in the order in which they are rewritten to upstream's. `save_pretrained` of transformers 5.17 to
# 5.24 writes a mixture by default (upstream leaves below `model.`, `attn.norm` for `attn.kv_norm`); it is read as well.
_FROM_TRANSFORMERS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^model\.", ""),
        (r"^lm_head\.", "head."),
        (r"^embed_tokens\.", "embed."),
        (r"^hc_head\.hc_", "hc_head_"),
        (r"\.self_attn\.", ".attn."),
        (r"\.mlp\.", ".ffn."),
        (r"\.input_layernorm\.", ".attn_norm."),
        (r"\.post_attention_layernorm\.", ".ffn_norm."),
        (r"\.attn_hc\.", ".hc_attn_"),
        (r"\.ffn_hc\.", ".hc_ffn_"),
        (r"\.attn\.sinks$", ".attn.attn_sink"),
        (r"\.compressor\.indexer\.scorer\.weights_proj\.", ".indexer.weights_proj."),
        (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
        (r"\.compressor\.indexer\.", ".indexer.compressor."),
        (r"\.compressor\.kv_norm\.", ".compressor.norm."),
        (r"\.compressor\.gate_proj\.", ".compressor.wgate."),
        (r"\.position_bias$", ".ape"),
        (r"\.attn\.norm\.", ".attn.kv_norm."),
        (r"\.q_a_norm\.", ".q_norm."),
        (r"\.q_a_proj\.", ".wq_a."),
        (r"\.q_b_proj\.", ".wq_b."),
        (r"\.kv_proj\.", ".wkv."),
        (r"\.o_a_proj\.", ".wo_a."),
        (r"\.o_b_proj\.", ".wo_b."),
        (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
        (r"\.experts\.gate_up_proj(?=$|_scale_inv$)", ".experts.w13.weight"),
        (r"\.experts\.down_proj(?=$|_scale_inv$)", ".experts.w2.weight"),
        (r"(experts(?:\.\d+)?)\.gate_proj\.", r"\1.w1."),
        (r"(experts(?:\.\d+)?)\.down_proj\.", r"\1.w2."),
        (r"(experts(?:\.\d+)?)\.up_proj\.", r"\1.w3."),
        (r"\.weight_scale_inv$", ".scale"),
    )
)


def upstream_name(name: str, layout: Layout) -> str:
    """The upstream name of a stored tensor; stacked experts become `ffn.experts.w13.weight` and `.w2.weight`."""
    if layout is Layout.TRANSFORMERS:
        for pattern, replacement in _FROM_TRANSFORMERS:
            name = pattern.sub(replacement, name)
    return name


# Upstream leaf names to transformers', for writing; order as in `_FROM_TRANSFORMERS`, the other way round.
_TO_TRANSFORMERS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\.experts\.w13\.weight$", ".experts.gate_up_proj"),
        (r"\.experts\.w2\.weight$", ".experts.down_proj"),
        (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
        (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
        (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
        (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
        (r"\.indexer\.weights_proj\.", ".compressor.indexer.scorer.weights_proj."),
        (r"\.indexer\.wq_b\.", ".compressor.indexer.q_b_proj."),
        (r"\.indexer\.compressor\.", ".compressor.indexer."),
        (r"(\.compressor(?:\.indexer)?)\.norm\.", r"\1.kv_norm."),
        (r"\.ape$", ".position_bias"),
        (r"\.attn_sink$", ".sinks"),
        (r"\.wgate\.", ".gate_proj."),
        (r"\.wkv\.", ".kv_proj."),
        (r"\.q_norm\.", ".q_a_norm."),
        (r"\.w([qo])_([ab])\.", r".\1_\2_proj."),
        (r"\.attn_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.hc_(attn|ffn)_", r".\1_hc."),
        (r"\.attn\.", ".self_attn."),
        (r"\.ffn\.", ".mlp."),
        (r"^hc_head_", "hc_head.hc_"),
        (r"^embed\.", "embed_tokens."),
        (r"^", "model."),
        (r"^model\.head\.", "lm_head."),
    )
)


def transformers_name(name: str) -> str:
    """transformers' name of an unquantised tensor given its upstream name; inverse of `upstream_name`."""
    for pattern, replacement in _TO_TRANSFORMERS:
        name = pattern.sub(replacement, name)
    return name
