"""What `inspect` reports: sizes from headers, layer kinds folded, and every problem at once."""

import dataclasses
import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from compressed_spec.inspection import Inspection, compact_layers, inspect_checkpoint, print_inspection
from compressed_spec.models.deepseek_v4.checkpoint import Checkpoint
from compressed_spec.models.deepseek_v4.config import AttentionKind, LayerSpec
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint


def cache_nbytes(checkpoint: Checkpoint, batch_size: int, max_length: int) -> int:
    return checkpoint.config.num_hidden_layers * batch_size * max_length


def inspect(folder: Path) -> Inspection:
    return inspect_checkpoint(folder, batch_size=2, max_length=512, cache_nbytes=cache_nbytes)


def rendered(inspection: Inspection) -> str:
    console = Console(file=io.StringIO(), width=200, color_system=None)
    print_inspection(inspection, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def layer(ratio: int) -> LayerSpec:
    kind = AttentionKind.SLIDING if ratio == 0 else AttentionKind.CSA if ratio == 4 else AttentionKind.HCA
    return LayerSpec(kind=kind, ratio=ratio, hash_routed=False)


@pytest.mark.parametrize(
    ("ratios", "text"),
    [
        ([0, 0, *[4, 128] * 20, 4], "2 x sliding, 20 x (CSA/4, HCA/128), CSA/4"),
        ([128, 128, *[4, 128] * 29, 4], "2 x HCA/128, 29 x (CSA/4, HCA/128), CSA/4"),
        ([0, 4, 128, 4], "sliding, CSA/4, HCA/128, CSA/4"),
        ([4], "CSA/4"),
        ([16, 16, 16], "3 x HCA/16"),
    ],
)
def test_layer_kinds_are_folded(ratios: list[int], text: str) -> None:
    assert compact_layers([layer(ratio) for ratio in ratios]) == text


def test_a_whole_checkpoint(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    found = inspect(folder)
    stored = [tensor for shard in folder.glob("*.safetensors") for tensor in load_file(shard).values()]
    assert (found.architecture, found.layout, found.draft_head) == ("DeepseekV4ForCausalLM", "upstream", "mtp")
    assert found.num_layers_by_kind == {"sliding": 1, "CSA": 2, "HCA": 1}
    assert (found.num_hidden_layers, found.num_hash_layers) == (4, 1)
    assert found.num_tensors == len(stored) == sum(total.num_tensors for total in found.tensors_by_dtype.values())
    assert found.weight_bytes == sum(tensor.nbytes for tensor in stored)
    assert found.weight_bytes == sum(total.num_bytes for total in found.tensors_by_dtype.values())
    assert found.tensors_by_dtype.keys() == {"BF16", "F32", "F8_E4M3", "F8_E8M0", "I64", "I8"}
    assert found.cache_bytes == 4 * 2 * 512
    assert (found.problems, found.notes) == ((), ())
    assert json.loads(json.dumps(dataclasses.asdict(found)))["tensors_by_dtype"]["I64"]["num_tensors"] == 1
    text = rendered(found)
    for part in ("upstream layout", "1 sliding, 2 CSA, 1 HCA", "mtp", "2 x 512 tokens", "4.0 KiB"):
        assert part in text
    assert "problem:" not in text


def test_notes_on_draft_heads(tmp_path: Path) -> None:
    dspark = inspect(make_tiny_checkpoint(tmp_path / "dspark", draft_head="dspark"))
    assert dspark.draft_head == "dspark"
    assert (dspark.notes, dspark.problems) == ((), ())
    assert "dspark" in rendered(dspark)
    absent = inspect(make_tiny_checkpoint(tmp_path / "none", draft_head="none", num_nextn_predict_layers=1))
    assert "num_nextn_predict_layers = 1, but the weights hold no draft head" in rendered(absent)


def test_every_problem_is_listed(tmp_path: Path) -> None:
    """A damaged file, a missing, a left-over and a mis-shaped tensor: four problems, one run."""
    folder = make_tiny_checkpoint(tmp_path)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    weight_map = index["weight_map"]
    damaged = folder / weight_map["embed.weight"]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    edited = folder / weight_map["norm.weight"]
    tensors = load_file(edited)
    del tensors["hc_head_base"], weight_map["hc_head_base"]
    tensors["surprise[red]"] = tensors["norm.weight"].clone()
    weight_map["surprise[red]"] = edited.name
    tensors["norm.weight"] = tensors["norm.weight"][:-1].clone()
    save_file(tensors, edited)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    found = inspect(folder)
    assert found.problems == (
        f"{damaged.name} is truncated ({damaged.stat().st_size} bytes instead of {damaged.stat().st_size + 1}): "
        "download it again",
        "hc_head_base is missing",
        "norm.weight has shape [127] instead of [128]",
        "surprise[red] is not a tensor of this architecture",
    )
    text = rendered(found)
    assert all(f"problem: {problem}" in text for problem in found.problems)


def test_long_lists_are_cut_when_printed(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "hidden_size": 256}))
    found = inspect(folder)
    assert len(found.problems) > 100
    text = rendered(found)
    assert text.count("problem:") == 20
    assert f"... and {len(found.problems) - 20} more problems" in text


def test_nothing_to_inspect(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        inspect(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"config.json does not exist"):
        inspect(tmp_path)
