"""Bytes of weights and history against counted headers of the released checkpoints, and published sizes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compressed_spec.commands.plan import CONFIGS
from compressed_spec.measure.planning.plan import cache_bytes, kv_bytes_per_token
from compressed_spec.measure.planning.roofline import PlannedModel
from compressed_spec.measure.planning.storage import check_split, checkpoint_storage
from compressed_spec.models.deepseek_v4.config import parse_config

DATA = Path(__file__).resolve().parent.parent / "data"


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("checkpoint", ["v4_flash", "v4_flash_0731", "v4_flash_base"])
def test_weights_are_those_of_the_headers(
    planned: Callable[..., PlannedModel], stored: Callable[[str], list[Any]], checkpoint: str, num_ranks: int
) -> None:
    expected = sum(one.num_bytes // (num_ranks if one.divided else 1) for one in stored(checkpoint))
    assert planned(checkpoint, num_ranks).weight_bytes == expected


@pytest.mark.parametrize(
    ("checkpoint", "num_ranks", "gibibytes"),
    [
        ("v4_flash", 8, 20.4),
        ("v4_flash", 4, 38.8),
        ("v4_flash", 2, 75.4),
        ("v4_flash", 1, 148.6),
        ("v4_flash_0731", 8, 21.4),
        ("v4_flash_0731", 1, 155.4),
        ("v4_flash_base", 8, 35.9),
        ("v4_flash_base", 4, 69.7),
        ("v4_pro", 8, 106.7),
        ("v4_pro", 16, 56.8),
        ("v4_pro", 1, 805.3),
    ],
)
def test_weights_are_those_published(
    planned: Callable[..., PlannedModel], checkpoint: str, num_ranks: int, gibibytes: float
) -> None:
    assert planned(checkpoint, num_ranks).weight_bytes / 2**30 == pytest.approx(gibibytes, abs=0.051)


@pytest.mark.parametrize(
    ("checkpoint", "num_bytes"), [("v4_flash", 159_609_485_896), ("v4_flash_0731", 166_878_536_440)]
)
def test_whole_checkpoints_to_the_byte(planned: Callable[..., PlannedModel], checkpoint: str, num_bytes: int) -> None:
    assert planned(checkpoint).weight_bytes == num_bytes


def test_history_grows_as_published(planned: Callable[..., PlannedModel]) -> None:
    flash, pro = planned("v4_flash"), planned("v4_pro")
    assert kv_bytes_per_token(flash) == 21 * (512 + 128) * 2 / 4 + 20 * 512 * 2 / 128 == 6880
    assert kv_bytes_per_token(pro) == 9848
    million = cache_bytes(flash, 1, 2**20, 1) - cache_bytes(flash, 1, 128, 1)
    assert million / 2**30 == pytest.approx(6.7, abs=0.05)


@pytest.mark.parametrize("name", ["v4-flash", "v4-pro"])
def test_built_in_configs_are_the_published_ones(name: str) -> None:
    published = json.loads((DATA / "configs" / f"{name.replace('-', '_')}.json").read_text())
    built_in = json.loads((CONFIGS / f"{name}.json").read_text())
    assert parse_config(built_in) == parse_config(published)
    assert checkpoint_storage(built_in) == checkpoint_storage(published)
    assert built_in.items() <= published.items()


def test_what_ranks_cannot_share(planned: Callable[..., PlannedModel]) -> None:
    config = planned("v4_flash").config
    for num_ranks in (1, 2, 4, 8):
        check_split(config, num_ranks)
    for num_ranks in (0, 3, 16):
        with pytest.raises(ValueError, match="does not divide"):
            check_split(config, num_ranks)
    check_split(planned("v4_pro").config, 16)


def test_storage_of_other_checkpoints() -> None:
    plain = checkpoint_storage({})
    assert plain.linear == plain.experts == plain.plain
    quantized = {"quantization_config": {"quant_method": "fp8"}}
    assert checkpoint_storage(quantized) == checkpoint_storage(quantized | {"expert_dtype": "fp4"})
    with pytest.raises(ValueError, match="expert_dtype"):
        checkpoint_storage(quantized | {"expert_dtype": "int3"})
