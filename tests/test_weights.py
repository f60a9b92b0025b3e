"""T21 and T22, loading: every parameter gets exactly the decoded value, whatever the files' order and formats."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from compressed_spec.models.deepseek_v4.checkpoint import open_checkpoint, read_checkpoint
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.names import expected_parameters, transformers_name
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint
from compressed_spec.models.deepseek_v4.weights import load_weights

INDEX = "model.safetensors.index.json"
STACKED = (".experts.w13", ".experts.w2")


def new_model(folder: Path, dtype: torch.dtype = torch.float32) -> DeepseekV4:
    checkpoint = open_checkpoint(folder)
    with torch.device("meta"):
        return DeepseekV4(
            checkpoint.config,
            draft_head=checkpoint.draft_head,
            num_draft_layers=checkpoint.num_draft_layers,
            dtype=dtype,
        )


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The loaded model's parameters and buffers."""
    model = new_model(folder, dtype)
    load_weights(model, open_checkpoint(folder), device="cpu", progress=False)
    return model.state_dict()


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for shard in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(shard).items()}


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], num_shards: int = 1) -> None:
    """Replace the weights of a folder, dealt out over shards in the dict's order."""
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    weight_map: dict[str, str] = {}
    for i in range(num_shards):
        part = dict(list(tensors.items())[i::num_shards])
        save_file({name: tensor.clone() for name, tensor in part.items()}, folder / f"part{i}.safetensors")
        weight_map |= dict.fromkeys(part, f"part{i}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "fp4")


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy that may be changed."""
    return Path(shutil.copytree(made, tmp_path / "copy"))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft_head": "none", "compress_ratios": (128, 4, 4, 0, 16)},
        {"layout": "transformers", "num_hash_layers": 0},
        {"draft_head": "dspark"},
        {"num_attention_heads": 8, "o_groups": 4, "hc_mult": 2, "n_routed_experts": 6, "num_experts_per_tok": 3},
    ],
)
def test_the_model_has_the_expected_parameters(options: dict[str, Any], tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, **options)
    checkpoint = open_checkpoint(folder)
    shapes = {name: tuple(tensor.shape) for name, tensor in new_model(folder).state_dict().items()}
    assert shapes == expected_parameters(checkpoint.config, checkpoint.draft_head, checkpoint.num_draft_layers)


@pytest.mark.parametrize(
    "options",
    [
        {"experts": "fp4"},
        {"experts": "fp8", "scale_dtype": "f32"},
        {"experts": "fp8", "hidden_size": 256, "moe_intermediate_size": 96},
        {"experts": "bf16"},
        {"layout": "transformers"},
    ],
)
def test_T22_equals_transformers(options: dict[str, Any], tmp_path: Path) -> None:
    """Every parameter of the target, bit for bit as transformers decodes the same files on a CPU."""
    ours = load(make_tiny_checkpoint(tmp_path, **options))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    target = {name: tensor for name, tensor in ours.items() if not name.startswith("mtp.")}
    assert len(target) == len(theirs)
    for name, tensor in target.items():
        stored = transformers_name(f"{name}.weight" if name.endswith(STACKED) else name)
        assert torch.equal(tensor, theirs[stored].to(tensor.dtype)), name


@pytest.mark.parametrize("original", [True, False])
def test_what_transformers_saves_loads_again(original: bool, tmp_path: Path) -> None:
    """Both of `save_pretrained`'s spellings: its own, and its default mixture of upstream leaves below `model.`."""
    ours = load(make_tiny_checkpoint(tmp_path / "ours", layout="transformers"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32)
    model.save_pretrained(tmp_path / "theirs", save_original_format=original)
    assert_same(ours, load(tmp_path / "theirs"))


def test_layouts_hold_the_same_model(tmp_path: Path) -> None:
    upstream = load(make_tiny_checkpoint(tmp_path / "a", experts="bf16", draft_head="none"))
    assert_same(upstream, load(make_tiny_checkpoint(tmp_path / "b", layout="transformers")))


def test_T22_stacked_quantised_experts(made: Path, folder: Path) -> None:
    """transformers' names with stacked FP4 experts and scales, as its quantised models keep them in memory."""
    tensors: dict[str, torch.Tensor] = {}
    stored = {name: tensor for name, tensor in all_tensors(folder).items() if not name.startswith("mtp.")}
    for name, tensor in stored.items():
        if ".ffn.experts." in name:
            continue
        if name.endswith(".scale"):
            name = transformers_name(f"{name.removesuffix('.scale')}.weight")
            tensors[f"{name.removesuffix('.weight')}.weight_scale_inv"] = tensor
        else:
            tensors[transformers_name(name)] = tensor
    for layer in range(4):
        for kind, suffix in (("weight", ""), ("scale", "_scale_inv")):
            prefix = f"layers.{layer}.ffn.experts"
            bytes_ = {key: stored[key].view(torch.uint8) for key in stored if key.startswith(prefix)}
            pairs = [torch.cat([bytes_[f"{prefix}.{e}.{w}.{kind}"] for w in ("w1", "w3")]) for e in range(4)]
            downs = [bytes_[f"{prefix}.{e}.w2.{kind}"] for e in range(4)]
            dtype = stored[f"{prefix}.0.w2.{kind}"].dtype
            base = f"model.layers.{layer}.mlp.experts"
            tensors[f"{base}.gate_up_proj{suffix}"] = torch.stack(pairs).view(dtype)
            tensors[f"{base}.down_proj{suffix}"] = torch.stack(downs).view(dtype)
    rewrite(folder, tensors)
    target = {name: tensor for name, tensor in load(made).items() if not name.startswith("mtp.")}
    assert_same(load(folder), target)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_T22_other_dtypes_are_casts_of_float32(made: Path, dtype: torch.dtype) -> None:
    exact, cast = load(made), load(made, dtype)
    assert any(tensor.dtype is dtype for tensor in cast.values())
    assert_same({name: tensor.to(cast[name].dtype) for name, tensor in exact.items()}, cast)


def test_T21_order_of_shards_and_keys_is_irrelevant(made: Path, folder: Path) -> None:
    items = list(all_tensors(folder).items())
    random.Random(0).shuffle(items)
    rewrite(folder, dict(items), num_shards=3)
    assert_same(load(made), load(folder))


@pytest.mark.parametrize(
    "name",
    [
        "embed.weight",
        "head.weight",
        "norm.weight",
        "hc_head_fn",
        "layers.0.ffn.gate.tid2eid",
        "layers.1.ffn.gate.bias",
        "layers.1.attn.attn_sink",
        "layers.1.attn.compressor.ape",
        "layers.1.attn.indexer.weights_proj.weight",
        "layers.1.attn.wq_a.weight",
        "layers.1.attn.wq_a.scale",
        "layers.2.ffn.experts.3.w3.weight",
        "layers.2.ffn.experts.3.w3.scale",
        "layers.2.ffn.shared_experts.w2.scale",
        "layers.3.hc_ffn_base",
        "mtp.0.e_proj.weight",
        "mtp.0.h_proj.scale",
        "mtp.0.enorm.weight",
    ],
)
def test_T21_removed_tensor_stops_loading(folder: Path, name: str) -> None:
    tensors = all_tensors(folder)
    del tensors[name]
    rewrite(folder, tensors)
    model = new_model(folder)
    named = "mtp.0." if name == "mtp.0.e_proj.weight" else name.removesuffix(".scale")
    with pytest.raises(ValueError, match=named) as refusal:
        load_weights(model, open_checkpoint(folder), device="cpu", progress=False)
    assert "\n" not in str(refusal.value)
    assert all(tensor.is_meta for tensor in model.state_dict().values())


def test_T21_left_over_tensor_stops_loading(folder: Path) -> None:
    rewrite(folder, {**all_tensors(folder), "layers.0.attn.surprise": torch.ones(1)})
    with pytest.raises(ValueError, match=r"in 1 tensor: layers.0.attn.surprise is not a tensor"):
        load(folder)


def test_T21_many_problems_are_counted(folder: Path) -> None:
    tensors = {name: tensor for name, tensor in all_tensors(folder).items() if not name.startswith("layers.2.")}
    rewrite(folder, tensors)
    with pytest.raises(ValueError, match=r"in \d\d tensors: layers.2.*; and \d\d more"):
        load(folder)


def test_T22_swapped_scales_change_the_weights(made: Path, folder: Path) -> None:
    """Scales carry information here: another tensor's scales of the same shape do not pass for these."""
    tensors = all_tensors(folder)
    first, second = (f"layers.1.ffn.experts.{e}.w1.scale" for e in (0, 1))
    tensors[first], tensors[second] = tensors[second], tensors[first]
    rewrite(folder, tensors)
    name = "layers.1.ffn.experts.w13"
    assert not torch.equal(load(made)[name], load(folder)[name])


@pytest.mark.parametrize("expert", [-1, 4])
def test_T21_token_table_out_of_range(folder: Path, expert: int) -> None:
    tensors = all_tensors(folder)
    tensors["layers.0.ffn.gate.tid2eid"][7, 1] = expert
    rewrite(folder, tensors)
    with pytest.raises(ValueError, match=r"layers.0.ffn.gate.tid2eid names experts .* only 0 to 3"):
        load(folder)


@pytest.mark.parametrize("name", ["layers.1.attn.wq_a.scale", "layers.1.ffn.experts.2.w2.scale"])
def test_T22_scale_that_is_no_number(folder: Path, name: str) -> None:
    tensors = all_tensors(folder)
    tensors[name].view(torch.uint8)[0, 0] = 255
    rewrite(folder, tensors)
    with pytest.raises(ValueError, match=f"{name} holds a scale that is not a positive finite number"):
        load(folder)


def test_damaged_files_stop_loading(folder: Path) -> None:
    model = new_model(folder)
    (folder / "model-00001-of-00007.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00001-of-00007.safetensors is missing"):
        load_weights(model, read_checkpoint(folder), device="cpu", progress=False)


def test_parameters_stay_parameters(made: Path) -> None:
    model = new_model(made)
    load_weights(model, open_checkpoint(made), device="cpu", progress=False)
    assert isinstance(model.head.weight, nn.Parameter)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
