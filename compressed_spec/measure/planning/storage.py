"""How many bytes each weight takes, whose part of a step it belongs to, and how ranks share it.

The formats are those of the released checkpoints, the split that of `parallel_plan`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from compressed_spec.models.deepseek_v4.config import DeepseekV4Config
from compressed_spec.models.deepseek_v4.json_fields import read_section
from compressed_spec.models.deepseek_v4.names import DraftHeadKind, Shape, expected_parameters
from compressed_spec.models.deepseek_v4.parallel_plan import amounts, split_of
from compressed_spec.models.deepseek_v4.stored_kinds import StoredKind, stored_kind


class Rate(StrEnum):
    """In which precision a matrix is multiplied."""

    FP4 = "fp4"
    FP8 = "fp8"
    BF16 = "bf16"
    FP32 = "fp32"


class Part(StrEnum):
    """What a step's time goes to. Down to DRAFT_INPUT a part is also that of its weights."""

    HYPER = "hyper-connections"
    ATTENTION = "attention weights"
    COMPRESSOR = "compressors"
    INDEXER = "indexer"
    ROUTER = "router"
    SHARED = "shared expert"
    EXPERTS = "routed experts"
    HEAD = "vocabulary head"
    EMBEDDING = "embedding"
    MARKOV = "markov head"
    DRAFT_INPUT = "draft head inputs"
    ACTIVATIONS = "activations"
    WINDOW = "window rows"
    ENTRIES = "compressed entries"
    ALL_REDUCE = "all-reduces"
    LAUNCHES = "launches"


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """Bytes of an element, and of a scale for each `block_rows` x `block_cols` of them (0: no scales)."""

    rate: Rate
    bits: int
    scale_bytes: int = 0
    block_rows: int = 1
    block_cols: int = 1

    def nbytes(self, shape: Shape) -> int:
        *lead, rows, cols = (1, *shape) if len(shape) == 1 else shape
        blocks = -(-rows // self.block_rows) * -(-cols // self.block_cols)
        return math.prod(lead) * (rows * cols * self.bits // 8 + blocks * self.scale_bytes)


BF16, F32 = Format(rate=Rate.BF16, bits=16), Format(rate=Rate.FP32, bits=32)
FP4 = Format(rate=Rate.FP4, bits=4, scale_bytes=1, block_cols=32)
I64 = Format(rate=Rate.FP32, bits=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Formats by kind of tensor: the linear layers that checkpoints quantise, routed experts, other matrices and norms,
    and what is kept wide whatever the checkpoint."""

    linear: Format
    experts: Format
    plain: Format
    wide: Format


def checkpoint_storage(raw: Mapping[str, object]) -> Storage:
    """The formats of a checkpoint, from its parsed config.json.

    With `expert_dtype` "fp8" (the Base models) scales are float32, with "fp4" or without it E8M0. Without a
    `quantization_config` all is bfloat16. Raises ValueError for another `expert_dtype`.
    """
    if read_section(raw, "quantization_config") is None:
        return Storage(linear=BF16, experts=BF16, plain=BF16, wide=F32)
    expert_dtype = raw.get("expert_dtype", "fp4")
    if expert_dtype not in ("fp4", "fp8"):
        raise ValueError(f"expert_dtype is {expert_dtype!r}: use 'fp4' or 'fp8'.")
    fp8 = Format(rate=Rate.FP8, bits=8, scale_bytes=1 if expert_dtype == "fp4" else 4, block_rows=128, block_cols=128)
    return Storage(linear=fp8, experts=FP4 if expert_dtype == "fp4" else fp8, plain=BF16, wide=F32)


FLOAT32_STORAGE = Storage(linear=F32, experts=F32, plain=F32, wide=F32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weight:
    """One parameter. block: what it belongs to, such as "layers.3" or "mtp.0"; "" for the whole model's own."""

    name: str
    block: str
    part: Part
    num_elements: int
    num_bytes: int
    rate: Rate
    is_matrix: bool
    split: bool

    def per_rank(self, num_ranks: int) -> int:
        """Bytes on each rank."""
        return self.num_bytes // num_ranks if self.split else self.num_bytes


# Of each name within its block, the first pattern that fits it.
_PARTS = tuple(
    (re.compile(pattern), part)
    for pattern, part in (
        (r"embed\.", Part.EMBEDDING),
        (r"head\.", Part.HEAD),
        (r"hc_", Part.HYPER),
        (r"attn\.indexer\.", Part.INDEXER),
        (r"attn\.compressor\.", Part.COMPRESSOR),
        (r"attn", Part.ATTENTION),
        (r"ffn\.experts\.", Part.EXPERTS),
        (r"ffn\.shared_experts\.", Part.SHARED),
        (r"ffn", Part.ROUTER),
        (r"norm\.", Part.HEAD),
        (r"(markov_head|confidence_head)\.", Part.MARKOV),
        (r"(e_proj|h_proj|main_proj|enorm|hnorm|main_norm)\.", Part.DRAFT_INPUT),
    )
)


def model_weights(
    config: DeepseekV4Config, storage: Storage, draft_head: DraftHeadKind, num_draft_layers: int
) -> list[Weight]:
    """Every parameter of a model."""
    weights = []
    for name, shape in expected_parameters(config, draft_head, num_draft_layers).items():
        block = re.match(r"(?:layers|mtp)\.\d+(?=\.)", name)
        leaf = name[block.end() + 1 :] if block else name
        form = _format(name, storage)
        weights.append(
            Weight(
                name=name,
                block=block.group() if block else "",
                part=next(part for pattern, part in _PARTS if pattern.match(leaf)),
                num_elements=math.prod(shape),
                num_bytes=form.nbytes(shape),
                rate=form.rate,
                is_matrix=len(shape) > 1 and not name.endswith((".ape", ".tid2eid")),
                split=split_of(name) is not None,
            )
        )
    return weights


def _format(name: str, storage: Storage) -> Format:
    formats = {
        StoredKind.TABLE: I64,
        StoredKind.EXPERTS: storage.experts,
        StoredKind.LINEAR: storage.linear,
        StoredKind.WIDE: storage.wide,
        StoredKind.PLAIN: storage.plain,
    }
    return formats[stored_kind(name)]


def check_split(config: DeepseekV4Config, num_ranks: int) -> None:
    """Raise ValueError unless so many ranks can share the model."""
    for key, count in (amounts(config) | {"index_n_heads": config.index_n_heads}).items():
        if num_ranks < 1 or count % num_ranks:
            raise ValueError(f"--tp {num_ranks} does not divide {key} = {count}: choose a divisor of it.")
