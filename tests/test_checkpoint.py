"""T21, files and headers: what a folder holds is read whole or refused by name, and every tensor has its place."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from safetensors.torch import load_file, save_file

from compressed_spec.models.deepseek_v4.checkpoint import (
    Checkpoint,
    DraftHeadKind,
    Layout,
    TensorInfo,
    detect_draft_head,
    detect_layout,
    open_checkpoint,
    read_checkpoint,
)
from compressed_spec.models.deepseek_v4.names import transformers_name, upstream_name
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint
from compressed_spec.models.deepseek_v4.weight_plan import plan_weights

VARIANTS: dict[str, dict[str, Any]] = {
    "fp4-mtp": {},
    "fp8-f32-mtp": {"experts": "fp8", "scale_dtype": "f32"},
    "fp4-dspark": {"draft_head": "dspark"},
    "bf16-none": {"experts": "bf16", "draft_head": "none"},
    "transformers": {"layout": "transformers"},
}
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: make_tiny_checkpoint(root / name, **options) for name, options in VARIANTS.items()}


@pytest.fixture
def folder(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A copy that may be damaged."""
    return Path(shutil.copytree(folders["fp4-mtp"], tmp_path / "copy"))


def with_tensors(checkpoint: Checkpoint, tensors: dict[str, TensorInfo]) -> Checkpoint:
    """The same checkpoint with other headers."""
    layout, draft_head = detect_layout(tensors), detect_draft_head(tensors)
    return dataclasses.replace(checkpoint, tensors=tensors, layout=layout, draft_head=draft_head)


def problems_of(checkpoint: Checkpoint, name: str, **changes: Any) -> tuple[str, ...]:
    """Problems once the header of one tensor is changed."""
    info = dataclasses.replace(checkpoint.tensors[name], **changes)
    return plan_weights(with_tensors(checkpoint, {**checkpoint.tensors, name: info})).problems


@pytest.mark.parametrize(
    ("variant", "layout", "head"),
    [
        ("fp4-mtp", Layout.UPSTREAM, DraftHeadKind.MTP),
        ("fp8-f32-mtp", Layout.UPSTREAM, DraftHeadKind.MTP),
        ("fp4-dspark", Layout.UPSTREAM, DraftHeadKind.DSPARK),
        ("bf16-none", Layout.UPSTREAM, DraftHeadKind.NONE),
        ("transformers", Layout.TRANSFORMERS, DraftHeadKind.NONE),
    ],
)
def test_whole_checkpoints_fit(folders: dict[str, Path], variant: str, layout: Layout, head: DraftHeadKind) -> None:
    checkpoint = open_checkpoint(folders[variant])
    plan = plan_weights(checkpoint)
    assert (checkpoint.layout, checkpoint.draft_head, plan.problems) == (layout, head, ())
    assert plan.ignored == ()
    assert checkpoint.num_draft_layers == {DraftHeadKind.MTP: 1, DraftHeadKind.DSPARK: 3, DraftHeadKind.NONE: 0}[head]


@pytest.mark.parametrize("variant", VARIANTS)
def test_T21_no_tensor_can_be_removed(folders: dict[str, Path], variant: str) -> None:
    """Every single tensor is missed: by its own name, its weight's (a scale), or what is left of its draft head."""
    checkpoint = open_checkpoint(folders[variant])
    for name in checkpoint.tensors:
        rest = {other: info for other, info in checkpoint.tensors.items() if other != name}
        problems = plan_weights(with_tensors(checkpoint, rest)).problems
        marks_head = name in ("mtp.0.e_proj.weight", "mtp.0.main_proj.weight")
        named = "mtp.0." if marks_head else name.removesuffix(".scale")
        assert problems, f"nothing misses {name}"
        assert named in problems[0]
        assert marks_head or len(problems) == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_T21_no_shape_can_change(folders: dict[str, Path], variant: str) -> None:
    checkpoint = open_checkpoint(folders[variant])
    for name, info in checkpoint.tensors.items():
        problems = problems_of(checkpoint, name, shape=(*info.shape[:-1], info.shape[-1] + 1))
        assert len(problems) == 1
        assert f"{name} has shape" in problems[0]


def test_T21_swapped_dimensions(folders: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(folders["fp4-mtp"])
    name = "layers.1.attn.wq_b.weight"
    (problem,) = problems_of(checkpoint, name, shape=checkpoint.tensors[name].shape[::-1])
    assert problem == f"{name} has shape [64, 256] instead of [256, 64]"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("norm.weight", "I8"),
        ("norm.weight", "F8_E4M3"),
        ("layers.0.ffn.gate.tid2eid", "F32"),
        ("layers.1.attn.attn_sink", "I64"),
        ("layers.1.attn.wq_a.scale", "F8_E4M3"),
        ("layers.1.ffn.experts.0.w1.scale", "I8"),
        ("layers.1.attn.wkv.weight", "F8_E5M2"),
    ],
)
def test_T21_wrong_dtypes(folders: dict[str, Path], name: str, dtype: str) -> None:
    (problem,) = problems_of(open_checkpoint(folders["fp4-mtp"]), name, dtype=dtype)
    assert problem.startswith(f"{name} has dtype {dtype}")


def test_T21_scale_of_a_plain_weight(folders: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(folders["fp4-mtp"])
    (problem,) = problems_of(checkpoint, "layers.1.attn.wkv.weight", dtype="BF16")
    assert problem.startswith("layers.1.attn.wkv.scale scales layers.1.attn.wkv.weight, which is BF16")


@pytest.mark.parametrize(
    "extra", ["layers.0.attn.bias", "layers.4.attn_norm.weight", "mtp.1.enorm.weight", "norm.scale"]
)
def test_T21_left_over_tensor(folders: dict[str, Path], extra: str) -> None:
    checkpoint = open_checkpoint(folders["fp4-mtp"])
    info = checkpoint.tensors["norm.weight"]
    (problem,) = plan_weights(with_tensors(checkpoint, {**checkpoint.tensors, extra: info})).problems
    assert problem == f"{extra} is not a tensor of this architecture"


def test_T21_hash_layer_takes_no_bias_and_others_no_table(folders: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(folders["fp4-mtp"])
    moved = dict(checkpoint.tensors)
    moved["layers.1.ffn.gate.tid2eid"] = moved.pop("layers.0.ffn.gate.tid2eid")
    assert len(plan_weights(with_tensors(checkpoint, moved)).problems) == 2


def test_base_copies_are_ignored_in_mtp_checkpoints_only(folders: dict[str, Path]) -> None:
    copies = ("mtp.0.emb.tok_emb.weight", "mtp.0.head.weight")
    for variant, ignored in (("fp8-f32-mtp", copies), ("bf16-none", ())):
        checkpoint = open_checkpoint(folders[variant])
        extra = dict.fromkeys(copies, checkpoint.tensors["embed.weight"])
        plan = plan_weights(with_tensors(checkpoint, {**checkpoint.tensors, **extra}))
        assert (plan.ignored, len(plan.problems)) == (ignored, 2 - len(ignored))


def test_dspark_weights_need_dspark_keys(folders: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(folders["fp4-dspark"])
    config = dataclasses.replace(checkpoint.config, dspark=None)
    assert "dspark_" in plan_weights(dataclasses.replace(checkpoint, config=config)).problems[0]


def test_declared_block_size_counts_where_it_fits(folders: dict[str, Path]) -> None:
    checkpoint = open_checkpoint(folders["fp4-mtp"])
    name = "layers.1.attn.wq_b"
    info = dataclasses.replace(checkpoint.tensors[f"{name}.scale"], shape=(8, 2))  # 32 x 32 blocks of [256, 64]
    finer = with_tensors(checkpoint, {**checkpoint.tensors, f"{name}.scale": info})
    assert plan_weights(finer).problems == (f"{name}.scale has shape [8, 2] instead of [2, 1]",)
    declared = dataclasses.replace(finer, weight_block_size=(32, 32))
    plan = plan_weights(declared)
    assert plan.problems == ()
    assert plan.sources[f"{name}.weight"][0].block == (32, 32)
    assert plan.sources["layers.1.attn.wkv.weight"][0].block == (128, 128)


def test_names_go_both_ways(folders: dict[str, Path]) -> None:
    """All names of transformers' layout, and those of transformers' own model, are recovered from upstream's."""
    for name in open_checkpoint(folders["transformers"]).tensors:
        assert transformers_name(upstream_name(name, Layout.TRANSFORMERS)) == name
    for name in open_checkpoint(folders["fp4-mtp"]).tensors:
        assert upstream_name(name, Layout.UPSTREAM) == name


def test_stacked_scales_of_transformers() -> None:
    stacked = "model.layers.0.mlp.experts.gate_up_proj"
    assert upstream_name(f"{stacked}_scale_inv", Layout.TRANSFORMERS) == "layers.0.ffn.experts.w13.scale"
    single = "model.layers.0.mlp.experts.3.gate_proj.weight_scale_inv"
    assert upstream_name(single, Layout.TRANSFORMERS) == "layers.0.ffn.experts.3.w1.scale"


# --- damaged folders ---


def refuse(path: Path | str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        open_checkpoint(path)
    assert "\n" not in str(refusal.value)


def shard_of(folder: Path, name: str) -> Path:
    weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return folder / weight_map[name]


def edit_index(folder: Path, **changes: str | None) -> None:
    index = json.loads((folder / INDEX).read_text())
    weight_map = {**index["weight_map"], **changes}
    index["weight_map"] = {name: file for name, file in weight_map.items() if file is not None}
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("cut", [1, 4096, -4])
def test_T21_truncated_shard(folder: Path, cut: int) -> None:
    shard = shard_of(folder, "norm.weight")
    data = shard.read_bytes()
    shard.write_bytes(data[:-cut])
    refuse(folder, f"{shard.name} (is truncated|has no readable)")


def test_T21_shard_with_trailing_bytes(folder: Path) -> None:
    shard = shard_of(folder, "norm.weight")
    shard.write_bytes(shard.read_bytes() + b"\0")
    refuse(folder, f"{shard.name} is too long")


def test_T21_shard_that_is_no_safetensors(folder: Path) -> None:
    shard = shard_of(folder, "norm.weight")
    shard.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    refuse(folder, f"{shard.name} has no readable safetensors header")
    shard.write_bytes((2).to_bytes(8, "little") + b"[]")
    refuse(folder, f"{shard.name} has no readable safetensors header")
    header = b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}'
    shard.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    refuse(folder, f"{shard.name} stores 4 bytes for x")


def test_T21_missing_shard(folder: Path) -> None:
    shard = shard_of(folder, "norm.weight")
    shard.unlink()
    refuse(folder, f"{shard.name} is missing")


def test_T21_index_and_shards_disagree(folder: Path) -> None:
    edit_index(folder, **{"norm.weight": None})
    refuse(folder, "holds norm.weight but model.safetensors.index.json does not list it")
    edit_index(folder, **{"norm.weight": shard_of(folder, "embed.weight").name})
    refuse(folder, "norm.weight")
    shard = shard_of(folder, "head.weight").name
    edit_index(folder, **{"norm.weight": shard, "extra.weight": shard})
    refuse(folder, f"lists extra.weight in {shard}, which does not hold it")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "lists no tensors"),
        ('{"weight_map": {}}', "lists no tensors"),
        ('{"weight_map": {"a": "../a.safetensors"}}', "only .safetensors files beside the index"),
        ('{"weight_map": {"a": "a.bin"}}', "only .safetensors files beside the index"),
        ('{"weight_map": {"a": 1}}', "only .safetensors files beside the index"),
    ],
)
def test_T21_unusable_index(folder: Path, text: str, message: str) -> None:
    (folder / INDEX).write_text(text)
    refuse(folder, message)


def test_folders_without_weights(folder: Path, tmp_path: Path) -> None:
    (folder / INDEX).unlink()
    refuse(folder, f"safetensors files but no {INDEX}")
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    refuse(folder, "holds no weights")
    (folder / "pytorch_model.bin").touch()
    refuse(folder, "pickled weights are never opened")
    (folder / "config.json").unlink()
    refuse(folder, "config.json does not exist")
    refuse(folder / "pytorch_model.bin", "is a file")
    refuse(tmp_path / "nowhere", "does not exist")
    refuse("./no/where", "does not exist")


def test_one_file_without_index(folder: Path) -> None:
    whole = {name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()}
    expected = open_checkpoint(folder).tensors
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    save_file(whole, folder / "anything.safetensors")
    found = open_checkpoint(folder).tensors
    assert {name: (info.dtype, info.shape, info.nbytes) for name, info in found.items()} == {
        name: (info.dtype, info.shape, info.nbytes) for name, info in expected.items()
    }


def test_all_faults_are_collected(folder: Path) -> None:
    """A damaged file is one problem; its tensors are not reported missing one by one, others still are."""
    shard, other = shard_of(folder, "layers.1.attn_norm.weight"), shard_of(folder, "norm.weight")
    shard.write_bytes(shard.read_bytes()[:-1])
    tensors = load_file(other)
    save_file({name: tensor for name, tensor in tensors.items() if name != "norm.weight"}, other)
    edit_index(folder, **{"norm.weight": None})
    checkpoint = read_checkpoint(folder)
    assert [problem.split()[0] for problem in checkpoint.problems] == [shard.name]
    assert plan_weights(checkpoint).problems == ("norm.weight is missing",)


def test_hub_download_is_safetensors_only(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def fetch(repo_id: str, *, allow_patterns: list[str]) -> str:
        asked.update(repo_id=repo_id, patterns=allow_patterns)
        return str(folders["fp4-mtp"])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert open_checkpoint("someone/model").folder == folders["fp4-mtp"]
    assert asked["repo_id"] == "someone/model"
    assert not any(pattern.endswith((".bin", ".pt", ".pth", ".py", "*")) for pattern in asked["patterns"])


def test_hub_failure_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_kwargs: object) -> str:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    refuse("someone/model", "someone/model is no folder here and cannot be had")
