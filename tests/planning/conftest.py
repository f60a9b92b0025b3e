"""Models of published dimensions, what their checkpoints store, and devices of round numbers."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from compressed_spec.measure.planning.devices import Device
from compressed_spec.measure.planning.roofline import PlannedModel
from compressed_spec.measure.planning.storage import Rate, checkpoint_storage
from compressed_spec.models.deepseek_v4.config import parse_config
from compressed_spec.models.deepseek_v4.names import DraftHeadKind

DATA = Path(__file__).resolve().parent.parent / "data"
# DeepSeek's published tables, written down once more: bytes of dtypes, and what its inference code divides over ranks.
BYTES = {"F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "BF16": 2, "F32": 4, "I64": 8}
DIVIDED = re.compile(
    r"^(embed|head)\.|markov_w[12]\.|attn\.(wq_b|wo_a|wo_b|attn_sink)|indexer\.(wq_b|weights_proj)\.|\.experts\."
)
DROPPED_COPIES = ("mtp.0.emb.tok_emb.weight", "mtp.0.head.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """One kind of tensor of a checkpoint: dimensions of each, bytes of all."""

    name: str
    num_dims: int
    num_bytes: int
    divided: bool


@pytest.fixture(scope="session")
def stored() -> Callable[[str], list[Stored]]:
    """Every kind of tensor of "v4_flash", "v4_flash_0731" or "v4_flash_base", from counted headers."""

    def read(checkpoint: str) -> list[Stored]:
        kinds = []
        for line in (DATA / "manifests" / f"{checkpoint}.tsv").read_text().splitlines():
            name, dtype, shape, count = line.split("\t")
            sizes = [int(size) for size in shape.split("x")]
            num_bytes = int(count) * math.prod(sizes) * BYTES[dtype]
            if name not in DROPPED_COPIES:
                divided = DIVIDED.search(name) is not None
                kinds.append(Stored(name=name, num_dims=len(sizes), num_bytes=num_bytes, divided=divided))
        return kinds

    return read


@pytest.fixture(scope="session")
def planned() -> Callable[..., PlannedModel]:
    """A released model, by the name of its config in tests/data/configs."""

    def make(checkpoint: str, num_ranks: int = 1) -> PlannedModel:
        raw = json.loads((DATA / "configs" / f"{checkpoint}.json").read_text())
        config = parse_config(raw)
        return PlannedModel(
            config=config,
            storage=checkpoint_storage(raw),
            draft_head=DraftHeadKind.MTP if config.dspark is None else DraftHeadKind.DSPARK,
            num_draft_layers=1 if config.dspark is None else 3,
            num_ranks=num_ranks,
        )

    return make


@pytest.fixture(scope="session")
def device() -> Callable[..., Device]:
    """1e12 bytes and 1e15 operations a second, and no other costs, unless told otherwise."""

    def make(**overrides: Any) -> Device:
        plain = Device(name="round", memory_bytes=1e12, bandwidth=1e12, flops={Rate.FP32: 1e15})
        return replace(plain, **overrides)

    return make
