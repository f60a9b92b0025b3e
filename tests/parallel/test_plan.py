"""The split of the real checkpoints, from lists of their tensors: all of it, once, and in the published sizes."""

import json
import math
from collections import Counter
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from compressed_spec.models.deepseek_v4.checkpoint import Checkpoint
from compressed_spec.models.deepseek_v4.config import parse_config
from compressed_spec.models.deepseek_v4.load import empty_model
from compressed_spec.models.deepseek_v4.manifest import described_checkpoint, read_manifest, stored_tensors
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.names import DraftHeadKind, expected_parameters
from compressed_spec.models.deepseek_v4.parallel_plan import PLAN, own_shape, possible_sizes, split_of
from compressed_spec.models.deepseek_v4.slices import Read, own_bytes, reads_of
from compressed_spec.models.deepseek_v4.weight_plan import WeightPlan, plan_weights
from compressed_spec.parallel import ParallelGroup
from compressed_spec.testing.models import tiny_config

DATA = Path(__file__).parents[1] / "data"
FLASH = ("v4_flash", "v4_flash_0731", "v4_flash_base")
GIB = 2**30


@cache
def described(name: str) -> tuple[Checkpoint, WeightPlan]:
    manifest = DATA / "tensor_lists" / f"{name}.tsv.gz"
    found = described_checkpoint(DATA / "configs" / f"{name}.json", manifest if manifest.exists() else None)
    return found, plan_weights(found)


@pytest.mark.parametrize(
    ("name", "num_tensors", "num_bytes"),
    [
        ("v4_flash", 69_187, 159_609_485_896),
        ("v4_flash_0731", 72_317, 166_878_536_440),
        ("v4_flash_base", 69_189, 294_673_469_000),
    ],
)
def test_every_stored_tensor_is_claimed_once(name: str, num_tensors: int, num_bytes: int) -> None:
    checkpoint, plan = described(name)
    assert (len(checkpoint.tensors), sum(info.nbytes for info in checkpoint.tensors.values())) == (
        num_tensors,
        num_bytes,
    )
    assert plan.problems == ()
    pieces = [piece for pieces in plan.sources.values() for piece in pieces]
    claimed = Counter([piece.tensor for piece in pieces] + [piece.scale for piece in pieces if piece.scale])
    claimed.update(plan.ignored)
    assert claimed == Counter(checkpoint.tensors.keys())
    assert plan.ignored == (() if name != "v4_flash_base" else ("mtp.0.emb.tok_emb.weight", "mtp.0.head.weight"))


@pytest.mark.parametrize("name", FLASH)
def test_a_config_says_what_upstream_stores(name: str) -> None:
    """Held against the lists of real checkpoints; V4-Pro's list is worked out so."""
    checkpoint, plan = described(name)
    experts = "fp8" if name.endswith("base") else "fp4"
    ours = stored_tensors(checkpoint.config, checkpoint.draft_head, experts=experts)
    assert ours == {key: info for key, info in checkpoint.tensors.items() if key not in plan.ignored}


PUBLISHED = {
    "v4_flash": {1: 148.6, 2: 75.4, 4: 38.8, 8: 20.4},
    "v4_flash_0731": {1: 155.4, 8: 21.4},
    "v4_flash_base": {4: 69.7, 8: 35.9},
}


@pytest.mark.parametrize(("name", "size"), [(name, size) for name, sizes in PUBLISHED.items() for size in sizes])
def test_bytes_of_a_process_are_the_published_ones(name: str, size: int) -> None:
    checkpoint, plan = described(name)
    last = ParallelGroup(rank=size - 1, size=size)
    assert round(own_bytes(plan, checkpoint, last) / GIB, 1) == PUBLISHED[name][size]


@pytest.mark.slow
def test_v4_pro_from_its_config() -> None:
    checkpoint, plan = described("v4_pro")
    assert len(checkpoint.tensors) == 145_116
    assert sum(info.nbytes for info in checkpoint.tensors.values()) == pytest.approx(864.7e9, rel=1e-4)
    assert plan.problems == plan.ignored == ()
    assert round(own_bytes(plan, checkpoint, ParallelGroup(size=8)) / GIB, 1) == 106.7
    assert round(own_bytes(plan, checkpoint, ParallelGroup(size=16)) / GIB, 1) == 56.8
    for size in (2, 16):
        check_parts(checkpoint, plan, size)


@pytest.mark.parametrize(
    ("name", "size"),
    [("v4_flash_base", 4), *(pytest.param(*case, marks=pytest.mark.slow) for case in product(FLASH, (1, 2, 4, 8)))],
)
def test_parts_are_the_whole_and_fit_the_models(name: str, size: int) -> None:
    check_parts(*described(name), size)


def check_parts(checkpoint: Checkpoint, plan: WeightPlan, size: int) -> None:
    """Parts of split tensors lie side by side and leave nothing out; others are read whole by each; shapes fit."""
    groups = [ParallelGroup(rank=rank, size=size) for rank in range(size)]
    shapes = [shapes_of(checkpoint, group) for group in groups]
    whole = expected_parameters(checkpoint.config, checkpoint.draft_head, checkpoint.num_draft_layers)
    for parameter, pieces in plan.sources.items():
        split = split_of(parameter)
        reads = [list(reads_of(parameter, pieces, checkpoint, group)) for group in groups]
        for mine, shape in zip(reads, shapes, strict=True):
            assert sum(map(num_weights, mine)) == math.prod(shape[parameter])
        if split is None:
            assert reads == [reads[0]] * size
            assert sum(map(num_weights, reads[0])) == math.prod(whole[parameter])
        elif pieces[0].expert is not None:
            assert [read.piece for mine in reads for read in mine] == list(pieces)  # each by one process, in order
        else:
            spans = [mine[0].weight[split.dim] for mine in reads]
            stops = [0, *(span.stop for span in spans)]
            assert [span.start for span in spans] == stops[:-1]
            assert stops[-1] == checkpoint.tensors[pieces[0].tensor].shape[split.dim]


def num_weights(read: Read) -> int:
    return math.prod(map(len, read.weight)) * (2 if read.piece.format == "fp4" else 1)


def shapes_of(checkpoint: Checkpoint, group: ParallelGroup) -> dict[str, tuple[int, ...]]:
    model = empty_model(checkpoint, dtype=torch.bfloat16, group=group)
    return {name: tuple(value.shape) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("head", list(DraftHeadKind))
@pytest.mark.parametrize("size", [1, 2])
def test_a_model_s_part_has_the_shapes_of_the_table(head: DraftHeadKind, size: int) -> None:
    more: dict[str, Any] = {
        "dspark_block_size": 4,
        "dspark_noise_token_id": 2,
        "dspark_target_layer_ids": [0],
        "dspark_markov_rank": 8,
    }
    config = parse_config(tiny_config(**(more if head is DraftHeadKind.DSPARK else {})))
    group = ParallelGroup(rank=size - 1, size=size)
    with torch.device("meta"):
        model = DeepseekV4(config, draft_head=head, num_draft_layers=2, dtype=torch.float32, group=group)
    expected = expected_parameters(config, head, 2)
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == {
        name: own_shape(name, shape, group) for name, shape in expected.items()
    }


def test_every_line_of_the_table_is_for_something() -> None:
    checkpoint, plan = described("v4_flash_0731")
    used = {split.pattern for name in plan.sources if (split := split_of(name)) is not None}
    assert used == {split.pattern for split in PLAN}
    assert checkpoint.draft_head is DraftHeadKind.DSPARK


def test_T36_numbers_of_processes_that_do_not_divide() -> None:
    flash, pro = (
        parse_config(json.loads((DATA / "configs" / f"{name}.json").read_text())) for name in ("v4_flash", "v4_pro")
    )
    assert possible_sizes(flash) == [1, 2, 4, 8]
    assert possible_sizes(pro) == [1, 2, 4, 8, 16]
    # Index heads count only where there is an indexer.
    assert possible_sizes(parse_config(tiny_config((0, 4), index_n_heads=3))) == [1]
    assert possible_sizes(parse_config(tiny_config((0, 8), index_n_heads=3))) == [1, 2]
    with pytest.raises(
        ValueError, match=r"^3 processes cannot share this model evenly \(o_groups = 8, .*use one of 1, 2, 4, 8\.$"
    ):
        DeepseekV4(flash, draft_head=DraftHeadKind.NONE, dtype=torch.bfloat16, group=ParallelGroup(size=3))


def test_T36_tables_that_are_none(tmp_path: Path) -> None:
    table = tmp_path / "list.tsv"
    with pytest.raises(ValueError, match=r"list.tsv cannot be read"):
        read_manifest(table)
    table.write_text("embed.weight\tBF16\t[8, 4]\nhead.weight BF16 [8]\n")
    with pytest.raises(ValueError, match="no tensor in line 2"):
        read_manifest(table)
    table.write_text("a.{0..2}.b\tF99\t[8]\n")
    with pytest.raises(ValueError, match="no tensor in line 1"):
        read_manifest(table)
    table.write_text("a.{0..2}.b\tF32\t[8]\na.1.b\tF32\t[8]\n")
    with pytest.raises(ValueError, match=r"lists a\.1\.b twice"):
        read_manifest(table)
    table.write_bytes(b"\x1f\x8bxx")
    with pytest.raises(ValueError, match="no table of tensors"):
        read_manifest(table)
