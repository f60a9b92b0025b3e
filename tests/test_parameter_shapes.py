"""The model's parameters are those that the config implies, by name and shape; the real sizes on the meta device."""

import json
from pathlib import Path

import pytest
import torch
from transformers import DeepseekV4Config as TransformersConfig
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4RotaryEmbedding

from compressed_spec.models.deepseek_v4.config import DeepseekV4Config, parse_config
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.names import DraftHeadKind, expected_parameters
from compressed_spec.models.deepseek_v4.rope import rope_frequencies, rotation

DATA = Path(__file__).parent / "data"
CONFIGS = {path.stem: path for path in sorted((DATA / "configs").glob("*.json"))} | {
    name: DATA / name / "config.json" for name in ("golden_mtp", "golden_dspark")
}


def read(name: str) -> DeepseekV4Config:
    return parse_config(json.loads(CONFIGS[name].read_text()))


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("head", [DraftHeadKind.MTP, DraftHeadKind.NONE])
def test_model_has_the_expected_parameters(name: str, head: DraftHeadKind) -> None:
    config = read(name)
    with torch.device("meta"):
        model = DeepseekV4(config, draft_head=head, num_draft_layers=3, dtype=torch.bfloat16)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert shapes == expected_parameters(config, head, 3)


@pytest.mark.parametrize(("name", "num_stages"), [("v4_flash_0731", 3), ("v4_flash_0731", 1), ("golden_dspark", 3)])
def test_model_with_a_dspark_head_has_the_expected_parameters(name: str, num_stages: int) -> None:
    config = read(name)
    with torch.device("meta"):
        model = DeepseekV4(config, draft_head=DraftHeadKind.DSPARK, num_draft_layers=num_stages, dtype=torch.bfloat16)
    shapes = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    assert shapes == expected_parameters(config, DraftHeadKind.DSPARK, num_stages)
    last = f"mtp.{num_stages - 1}"
    assert shapes["mtp.0.main_proj.weight"] == (config.hidden_size, 3 * config.hidden_size)
    assert shapes[f"{last}.markov_head.markov_w2.weight"][0] == config.vocab_size
    assert sorted(key for key in shapes if "confidence_head" in key) == [f"{last}.confidence_head.proj.weight"]


@pytest.mark.parametrize(("name", "billions"), [("v4_flash", 284), ("v4_flash_base", 284), ("v4_pro", 1600)])
def test_number_of_parameters_is_what_the_model_cards_say(name: str, billions: int) -> None:
    with torch.device("meta"):
        model = DeepseekV4(read(name), draft_head=DraftHeadKind.NONE, dtype=torch.bfloat16)
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.02)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("label", ["main", "compress"])
def test_rotation_equals_transformers(name: str, label: str) -> None:
    raw = json.loads(CONFIGS[name].read_text())
    raw["compress_ratios"] = raw["compress_ratios"][: raw["num_hidden_layers"]]
    position_N = torch.tensor([0, 1, 2, 100, 1023])
    rope = DeepseekV4RotaryEmbedding(TransformersConfig(**raw))
    ours_P = rope_frequencies(read(name), compress=label == "compress", dtype=torch.float32)
    torch.testing.assert_close(ours_P, getattr(rope, f"{label}_inv_freq"), rtol=1e-6, atol=0)
    cos, sin = rope(torch.zeros(1), position_N[None], layer_type=label)
    here = rotation(ours_P, position_N)
    # An angle of a thousand amplifies the last bit of its float32 frequency by as much.
    torch.testing.assert_close(here.cos_NP, cos[0], rtol=0, atol=2e-4)
    torch.testing.assert_close(here.sin_NP, sin[0], rtol=0, atol=2e-4)
