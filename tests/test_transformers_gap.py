"""Greedy text equals transformers' generate; and what transformers itself cannot do for DeepSeek-V4.

The last tests document why this package exists: should one of them fail with a newer transformers, it can draft too.
"""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV4ForCausalLM, DynamicCache

from compressed_spec import TokenTree, generate, load_model
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint

KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 16: "heavily_compressed_attention"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ratios = (0, 4, 16)
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("mixed"),
        experts="bf16",
        compress_ratios=ratios,
        layer_types=[KINDS[ratio] for ratio in ratios],
        compress_rates={KINDS[4]: 4, KINDS[16]: 16},
    )


@pytest.fixture(scope="module")
def model(folder: Path) -> DeepseekV4:
    return load_model(folder, progress=False)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    model = DeepseekV4ForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None  # nothing stops a text but its length
    model.generation_config.do_sample = False
    return model


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return random.Random(0).choices(range(2, 384), k=45)


@pytest.fixture(scope="module")
def greedy_ids(oracle: Any, prompt: list[int]) -> list[int]:
    """512 tokens of transformers' own greedy decoding."""
    ids: list[int] = oracle.generate(torch.tensor([prompt]), max_new_tokens=512)[0, len(prompt) :].tolist()
    return ids


def test_greedy_text_has_no_near_ties(oracle: Any, prompt: list[int], greedy_ids: list[int]) -> None:
    """Rounding cannot explain a difference: every chosen token leads by far more."""
    assert len(greedy_ids) == 512
    assert len(set(greedy_ids)) > 50
    with torch.no_grad():
        logits_TV = oracle(torch.tensor([[*prompt, *greedy_ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    best_T2 = logits_TV.topk(2, dim=-1).values
    assert (best_T2[:, 0] - best_T2[:, 1]).min() > 1e-4 * logits_TV.abs().max()
    assert logits_TV.argmax(-1).tolist() == greedy_ids


@pytest.mark.parametrize("tree", ["off", "s3_k2_d6"])
def test_greedy_text_equals_transformers_generate(
    model: DeepseekV4, prompt: list[int], greedy_ids: list[int], tree: str
) -> None:
    (out,) = generate(model, [prompt], tree=tree, drafter="mtp", max_new_tokens=512, stop_token_ids=[])
    assert out.token_ids == greedy_ids
    assert out.finish_reason == "length"
    if tree != "off":
        assert out.stats.num_accepted_tokens > 50  # the text is long enough to have been drafted in earnest


@pytest.mark.parametrize("option", ["assistant_model", "prompt_lookup_num_tokens"])
def test_transformers_refuses_assisted_generation(oracle: Any, prompt: list[int], option: str) -> None:
    value = oracle if option == "assistant_model" else 3
    with pytest.raises(ValueError, match="not supported with stateful models, such as DeepseekV4ForCausalLM"):
        oracle.generate(torch.tensor([prompt]), max_new_tokens=4, **{option: value})


@torch.no_grad()
def test_transformers_cropped_cache_keeps_what_was_rejected(oracle: Any, model: DeepseekV4) -> None:
    """`crop` takes tokens from the window only: entries that they closed stay, and later tokens attend to them."""
    committed, rejected, following = [5, 9, 300, 7, 11, 2], [40, 41], [60, 61, 62, 63]
    fresh_V = oracle(torch.tensor([committed + following]), use_cache=False).logits[0, -1]
    scale = fresh_V.abs().max()

    cache = DynamicCache(config=oracle.config)  # passed by place: its name in `forward` changes with the version
    oracle(torch.tensor([committed + rejected]), None, None, cache)
    cache.crop(-len(rejected))
    assert cache.get_seq_length() == len(committed)
    assert cache.layers[1].entry_count["compressor"] == 2  # six tokens close one window of four, not two
    positions = torch.arange(len(committed), len(committed) + len(following))[None]
    cropped_V = oracle(torch.tensor([following]), None, positions, cache).logits[0, -1]
    assert (cropped_V - fresh_V).abs().max() > 1e-2 * scale  # a hundred times what rounding explains

    ours = model.new_cache(max_length=16)
    model.prefill(ours, [committed])
    ours.commit(model.verify(ours, [TokenTree.chain(rejected)]), [[]])
    logits_1V = model.prefill(ours, [following])
    assert (logits_1V[0] - fresh_V).abs().max() < 1e-4 * scale
