"""The state that a DeepSeek-V4 configuration keeps."""

from collections import Counter
from dataclasses import replace

from compressed_spec.kernels.fp8_rows import GROUP
from compressed_spec.layout import StateSpec
from compressed_spec.models.deepseek_v4.compressor import compression_of
from compressed_spec.models.deepseek_v4.config import DeepseekV4Config
from compressed_spec.models.deepseek_v4.modules import Precision
from compressed_spec.models.deepseek_v4.names import DraftHeadKind


def state_spec(
    config: DeepseekV4Config, *, draft_head: DraftHeadKind, num_draft_layers: int, precision: Precision
) -> StateSpec:
    """Pools of a model of this configuration and draft head.

    An MTP head folds a token into the stream before it, a DSpark head reads the token's own.
    """
    kinds = Counter(comp for layer in config.layers if (comp := compression_of(config, layer)) is not None)
    return StateSpec(
        sliding_window=config.sliding_window,
        num_layers=config.num_hidden_layers,
        head_dim=config.head_dim,
        compressions=tuple(replace(kind, num_layers=count) for kind, count in kinds.items()),
        head_layers=0 if draft_head is DraftHeadKind.NONE else num_draft_layers,
        head_shift=-1 if draft_head is DraftHeadKind.MTP else 0,
        num_streams=config.hc_mult,
        model_dim=config.hidden_size,
        dtype=precision.dtype,
        buffer_dtype=precision.wide,
        fp8_rotated=config.qk_rope_head_dim if precision.fp8_rows else None,
    )


def check_packable(config: DeepseekV4Config) -> None:
    """Raise ValueError unless the channels of KV that are not rotated are whole groups of an FP8 row."""
    plain = config.head_dim - config.qk_rope_head_dim
    if plain % GROUP:
        raise ValueError(
            f"kv_dtype='fp8' needs a multiple of {GROUP} channels that are not rotated, and head_dim minus "
            f"qk_rope_head_dim is {plain}: leave it out."
        )
