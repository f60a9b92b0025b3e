"""Which tensor is dealt out to the processes that share a model, and along what: DeepSeek's own split.

What the table does not name is held whole by each: the projections that every head reads, compressors, gates with their
token tables, shared experts, norms, hyper-connections, a draft head's projections. State is never split either: keys
and values have one head, so every process keeps all of it.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase

from compressed_spec.models.deepseek_v4.config import AttentionKind, DeepseekV4Config
from compressed_spec.models.deepseek_v4.names import Shape
from compressed_spec.parallel import ParallelGroup


class Dealt(StrEnum):
    """What is dealt out, in equal contiguous parts."""

    VOCABULARY = "vocabulary"
    HEADS = "attention heads"
    GROUPS = "output groups"
    INDEX_HEADS = "index heads"
    EXPERTS = "experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Dimension `dim` of the parameters that match `pattern` runs over what is dealt out."""

    pattern: str
    dealt: Dealt
    dim: int


PLAN = (
    # A process has whole output groups, and exactly the heads that they read; wo_b takes its columns from them.
    Split(pattern="*.attn.wq_b.weight", dealt=Dealt.HEADS, dim=0),
    Split(pattern="*.attn.attn_sink", dealt=Dealt.HEADS, dim=0),
    Split(pattern="*.attn.wo_a.weight", dealt=Dealt.GROUPS, dim=0),
    Split(pattern="*.attn.wo_b.weight", dealt=Dealt.GROUPS, dim=1),  # its products are summed
    # Scores are sums over index heads, and are summed before any entry is chosen.
    Split(pattern="*.indexer.wq_b.weight", dealt=Dealt.INDEX_HEADS, dim=0),
    Split(pattern="*.indexer.weights_proj.weight", dealt=Dealt.INDEX_HEADS, dim=0),
    # Whole experts, never a part of one; their outputs are summed.
    Split(pattern="*.ffn.experts.w13", dealt=Dealt.EXPERTS, dim=0),
    Split(pattern="*.ffn.experts.w2", dealt=Dealt.EXPERTS, dim=0),
    # Embeddings are summed (all but one process have zeros), logits put together.
    Split(pattern="embed.weight", dealt=Dealt.VOCABULARY, dim=0),
    Split(pattern="head.weight", dealt=Dealt.VOCABULARY, dim=0),
    Split(pattern="*.markov_head.markov_w1.weight", dealt=Dealt.VOCABULARY, dim=0),
    Split(pattern="*.markov_head.markov_w2.weight", dealt=Dealt.VOCABULARY, dim=0),
)


def split_of(parameter: str) -> Split | None:
    """How a parameter is split, None if every process holds it whole."""
    return next((split for split in PLAN if fnmatchcase(parameter, split.pattern)), None)


def own_shape(parameter: str, shape: Shape, group: ParallelGroup) -> Shape:
    """The shape of one process's part of a parameter."""
    split = split_of(parameter)
    if split is None:
        return shape
    return (*shape[: split.dim], group.part(shape[split.dim]), *shape[split.dim + 1 :])


def amounts(config: DeepseekV4Config) -> dict[str, int]:
    """What must divide by the number of processes: config key to value."""
    found = {key: getattr(config, key) for key in ("o_groups", "num_attention_heads", "n_routed_experts", "vocab_size")}
    if any(layer.kind is AttentionKind.CSA for layer in config.layers):
        found["index_n_heads"] = config.index_n_heads
    return found


def possible_sizes(config: DeepseekV4Config) -> list[int]:
    """Numbers of processes that can share a model of this configuration, ascending."""
    largest = math.gcd(*amounts(config).values())
    return [size for size in range(1, largest + 1) if largest % size == 0]


def check_size(config: DeepseekV4Config, size: int) -> None:
    """Raise ValueError unless so many processes can share the model."""
    if size not in (possible := possible_sizes(config)):
        odd = ", ".join(f"{key} = {value}" for key, value in amounts(config).items() if size < 1 or value % size)
        numbers = ", ".join(map(str, possible))
        raise ValueError(f"{size} processes cannot share this model evenly ({odd}): use one of {numbers}.")
