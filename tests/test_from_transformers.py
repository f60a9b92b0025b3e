"""Our model over the weights of a loaded transformers model: what is shared, what is copied, what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV4ForCausalLM

from compressed_spec.hf import tree_generate
from compressed_spec.models.deepseek_v4.from_transformers import share_parameters
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), layout="transformers", compress_ratios=(0, 4, 8))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return DeepseekV4ForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def test_parameters_are_shared_not_copied(folder: Path) -> None:
    hf_model = load(folder)
    theirs = {tensor.data_ptr() for tensor in hf_model.state_dict().values()}
    ours = share_parameters(hf_model).state_dict()
    assert len(ours) == len(hf_model.state_dict())
    assert {tensor.data_ptr() for tensor in ours.values()} == theirs
    assert all(parameter.requires_grad for parameter in hf_model.parameters())


def test_only_what_is_wider_here_is_copied_beside_bfloat16(folder: Path) -> None:
    hf_model = load(folder, torch.bfloat16)
    theirs = {tensor.data_ptr(): tensor for tensor in hf_model.state_dict().values()}
    ours = share_parameters(hf_model).state_dict()
    copied = {name for name, tensor in ours.items() if tensor.data_ptr() not in theirs}
    kinds = {name.split(".", 2)[2] for name in copied}
    compressor = {f"attn.{lane}compressor.{w}.weight" for lane in ("", "indexer.") for w in ("wkv", "wgate")}
    assert kinds == {"ffn.gate.weight", *compressor}
    assert {ours[name].dtype for name in copied} == {torch.float32}
    assert all(ours[name].dtype == theirs[ours[name].data_ptr()].dtype for name in ours.keys() - copied)


def test_changed_weights_show(folder: Path) -> None:
    prompt = list(range(20, 40))
    hf_model = load(folder)
    with torch.no_grad():
        hf_model.lm_head.weight.copy_(hf_model.lm_head.weight.roll(1, 0))
        hf_model.model.layers[1].mlp.experts.down_proj.mul_(-1)
    ids = torch.tensor([prompt])
    expected = hf_model.generate(ids, max_new_tokens=8, do_sample=False)
    assert hf_model.generate(ids, max_new_tokens=8, do_sample=False, custom_generate=tree_generate).equal(expected)


def test_T36_refused_models(folder: Path) -> None:
    with pytest.raises(ValueError, match="not a Linear"):
        share_parameters(torch.nn.Linear(2, 2))
    hf_model = load(folder)
    hf_model.model.layers[1].self_attn.q_a_proj.bias = torch.nn.Parameter(torch.zeros(64))
    with pytest.raises(ValueError, match=r"layers\.1\.attn\.wq_a\.bias; merge adapters"):
        share_parameters(hf_model)
    with pytest.raises(ValueError, match="offloaded, sharded or quantised"):
        share_parameters(load(folder).to("meta"))
