"""The state that a DeepSeek-V4 configuration keeps."""

from collections import Counter
from dataclasses import replace

from compressed_spec.layout import StateSpec
from compressed_spec.models.deepseek_v4.attention import compression_of
from compressed_spec.models.deepseek_v4.config import DeepseekV4Config
from compressed_spec.models.deepseek_v4.modules import Precision


def state_spec(config: DeepseekV4Config, *, with_mtp: bool, precision: Precision) -> StateSpec:
    """Pools of a model of this configuration, with or without the MTP head's."""
    kinds = Counter(comp for layer in config.layers if (comp := compression_of(config, layer)) is not None)
    return StateSpec(
        sliding_window=config.sliding_window,
        num_layers=config.num_hidden_layers,
        head_dim=config.head_dim,
        compressions=tuple(replace(kind, num_layers=count) for kind, count in kinds.items()),
        head_layers=int(with_mtp),
        num_streams=config.hc_mult,
        model_dim=config.hidden_size,
        dtype=precision.dtype,
        buffer_dtype=precision.wide,
    )
