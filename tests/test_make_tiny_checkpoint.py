"""Tiny checkpoints: real layouts and dtypes, the same bytes every time, and models that are worth testing with."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from compressed_spec.models.deepseek_v4.checkpoint import open_checkpoint
from compressed_spec.models.deepseek_v4.config import AttentionKind
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint

SCRIPT = Path(__file__).parent.parent / "scripts" / "make_tiny_checkpoint.py"


def dtypes(folder: Path, *names: str) -> list[str]:
    tensors = open_checkpoint(folder).tensors
    return [tensors[name].dtype for name in names]


@pytest.mark.parametrize("options", [{}, {"layout": "transformers"}, {"draft_head": "dspark", "experts": "fp8"}])
def test_same_arguments_same_bytes(options: dict[str, Any], tmp_path: Path) -> None:
    first, second, other = (
        make_tiny_checkpoint(tmp_path / name, seed=seed, **options) for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    files = sorted(path.name for path in first.iterdir())
    assert files == sorted(path.name for path in second.iterdir())
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} < set(files)
    for file in files:
        assert (first / file).read_bytes() == (second / file).read_bytes(), file
    shards = [file for file in files if file.endswith(".safetensors")]
    assert len(shards) > 4
    assert all((first / shard).read_bytes() != (other / shard).read_bytes() for shard in shards)


def test_upstream_dtypes(tmp_path: Path) -> None:
    flash = make_tiny_checkpoint(tmp_path / "flash")
    plain = ("embed.weight", "head.weight", "layers.1.attn.compressor.wkv.weight", "layers.1.ffn.gate.weight")
    full = ("hc_head_fn", "layers.1.attn.attn_sink", "layers.1.attn.indexer.compressor.ape", "layers.1.ffn.gate.bias")
    linear = ("layers.1.attn.wo_a", "layers.1.attn.indexer.wq_b", "layers.1.ffn.shared_experts.w2", "mtp.0.e_proj")
    expert = "layers.1.ffn.experts.0.w1"
    assert set(dtypes(flash, *plain)) == {"BF16"}
    assert set(dtypes(flash, *full)) == {"F32"}
    assert set(dtypes(flash, *(f"{name}.weight" for name in linear))) == {"F8_E4M3"}
    assert set(dtypes(flash, *(f"{name}.scale" for name in linear))) == {"F8_E8M0"}
    assert dtypes(flash, f"{expert}.weight", f"{expert}.scale") == ["I8", "F8_E8M0"]
    assert dtypes(flash, "layers.0.ffn.gate.tid2eid", "layers.1.attn.indexer.weights_proj.weight") == ["I64", "BF16"]
    base = make_tiny_checkpoint(tmp_path / "base", experts="fp8", scale_dtype="f32")
    assert dtypes(base, f"{expert}.weight", f"{expert}.scale", "mtp.0.h_proj.scale") == ["F8_E4M3", "F32", "F32"]
    unquantised = make_tiny_checkpoint(tmp_path / "bf16", experts="bf16")
    assert {info.dtype for info in open_checkpoint(unquantised).tensors.values()} == {"BF16", "F32", "I64"}


def test_options_reach_the_config(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, compress_ratios=(0, 4, 16, 4, 16), index_topk=3, rope_scaling=None)
    config = open_checkpoint(folder).config
    assert [layer.ratio for layer in config.layers] == [0, 4, 16, 4, 16]
    assert (config.index_topk, config.yarn) == (3, None)


def test_transformers_layout_takes_any_rate(tmp_path: Path) -> None:
    rates = {"compressed_sparse_attention": 2, "heavily_compressed_attention": 8}
    folder = make_tiny_checkpoint(
        tmp_path, layout="transformers", compress_ratios=(0, 4, 128), compress_rates=rates, num_hash_layers=0
    )
    config = open_checkpoint(folder).config
    assert [(layer.kind, layer.ratio) for layer in config.layers] == [
        (AttentionKind.SLIDING, 0),
        (AttentionKind.CSA, 2),
        (AttentionKind.HCA, 8),
    ]


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="draft_head must be 'none'"):
        make_tiny_checkpoint(tmp_path, layout="transformers", draft_head="mtp")
    with pytest.raises(ValueError, match="two different HCA ratios"):
        make_tiny_checkpoint(tmp_path, layout="transformers", compress_ratios=(16, 128))
    with pytest.raises(ValueError, match="o_groups is 3"):
        make_tiny_checkpoint(tmp_path, o_groups=3)
    with pytest.raises(ValueError, match="vocab_size is 100000"):
        make_tiny_checkpoint(tmp_path, vocab_size=100000)


def test_tokenizer(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert len(tokenizer) == open_checkpoint(folder).config.vocab_size
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    for text in ("The window slides over the newest words.", "\u00fcber \u6f22\u5b57 \U0001f332\n\tx = 1"):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) < len(text.encode()) + 1
        assert tokenizer.decode(ids) == text
    chat = "<\uff5cbegin\u2581of\u2581sentence\uff5c><\uff5cUser\uff5c>hi<\uff5cAssistant\uff5c></think>"
    assert tokenizer(chat)["input_ids"][:2] == [0, 3]


def test_vocabulary_too_small_for_a_tokenizer(tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, vocab_size=8)
    assert not (folder / "tokenizer.json").exists()
    assert open_checkpoint(folder).config.vocab_size == 8


def test_the_model_is_worth_testing_with(tmp_path: Path) -> None:
    """Logits neither flat nor certain, and greedy text that wanders."""
    model = AutoModelForCausalLM.from_pretrained(make_tiny_checkpoint(tmp_path), dtype=torch.float32).float()
    prompt = torch.randint(8, 384, (1, 140), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(prompt).logits
        text = model.generate(prompt, max_new_tokens=40, do_sample=False)[0, 140:].tolist()
    assert 1 < logits.std() < 2
    assert len(text) == 40
    assert len(set(text)) > 20


def test_script(tmp_path: Path) -> None:
    made = make_tiny_checkpoint(
        tmp_path / "a", experts="fp8", draft_head="none", compress_ratios=(0, 4), hidden_size=64
    )
    options = ["--experts", "fp8", "--draft-head", "none", "--compress-ratios", "0", "4", "--hidden-size", "64"]
    run = subprocess.run(
        [sys.executable, SCRIPT, tmp_path / "b", *options], capture_output=True, text=True, check=True, timeout=120
    )
    assert run.stdout.strip() == str(tmp_path / "b")
    assert json.loads((made / "config.json").read_text())["compress_ratios"] == [0, 4]
    for path in made.iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_script_makes_a_checkpoint_of_a_size_to_time(tmp_path: Path) -> None:
    """Over ten million parameters beside the draft head's, whatever its other options."""
    options = ["--size", "bench", "--draft-head", "none", "--experts", "bf16"]
    subprocess.run([sys.executable, SCRIPT, tmp_path, *options], capture_output=True, check=True, timeout=120)
    checkpoint = open_checkpoint(tmp_path)
    config = checkpoint.config
    assert sum(torch.Size(info.shape).numel() for info in checkpoint.tensors.values()) > 10_000_000
    assert (config.hidden_size, config.num_hidden_layers, config.max_position_embeddings) == (256, 8, 16384)
    assert {layer.kind for layer in config.layers} == set(AttentionKind)
