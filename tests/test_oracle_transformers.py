"""Logits equal those of transformers' DeepseekV4ForCausalLM in float32 (eager), at every position and every tree node.

Index heads are 16 or more: with few of them exact ties of zero scores are common, and transformers breaks those by how
many entries other queries see. `drops_entries` makes sure that rounding cannot change a selection either.

T = tokens, V = vocabulary, S = entries scored, B = sequences, N = nodes
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM, FineGrainedFP8Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4IndexerScorer

from compressed_spec import TokenTree, load_model
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint

SLIDING, CSA, HCA = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
TOLERANCE = 1e-4  # of the largest logit


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A tiny checkpoint: its layers, how it is stored, and what departs from the builder's defaults."""

    ratios: tuple[int, ...]
    length: int = 96
    experts: Any = "bf16"
    scale_dtype: Any = "e8m0"
    layout: Any = "upstream"
    overrides: dict[str, Any] = field(default_factory=dict)

    def make(self, folder: Path) -> Path:
        # transformers knows ratios other than 4 and 128 only by these two keys, which upstream's layout may carry too.
        kinds = [SLIDING if ratio == 0 else CSA if ratio == 4 else HCA for ratio in self.ratios]
        rates = {CSA: 4, HCA: max([ratio for ratio in self.ratios if ratio not in (0, 4)], default=128)}
        return make_tiny_checkpoint(
            folder,
            experts=self.experts,
            scale_dtype=self.scale_dtype,
            layout=self.layout,
            compress_ratios=self.ratios,
            **{"layer_types": kinds, "compress_rates": rates, **self.overrides},
        )


def load_oracle(folder: Path) -> Any:
    """transformers' model in float32; stored FP8 and FP4 weights are dequantised by its own code."""
    options: dict[str, object] = {}
    if "quantization_config" in (folder / "config.json").read_text():
        options = {"quantization_config": FineGrainedFP8Config(dequantize=True), "device_map": "cpu"}
    model = DeepseekV4ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", local_files_only=True, **options
    )
    return model.float().eval()  # older versions dequantise to bfloat16, which holds such values exactly


@torch.no_grad()
def oracle_logits(oracle: Any, sequences_BT: Sequence[Sequence[int]]) -> torch.Tensor:
    """Logits `[B, T, V]` of one fresh forward over whole sequences of equal length."""
    logits_BTV: torch.Tensor = oracle(torch.tensor(sequences_BT), use_cache=False).logits
    return logits_BTV


def engine_logits(model: DeepseekV4, tokens_T: Sequence[int], sizes: Iterator[int]) -> torch.Tensor:
    """Logits `[T, V]` of chains of these sizes, verified and accepted whole, one after the other."""
    cache = model.new_cache(batch_size=1, max_length=len(tokens_T), max_nodes=len(tokens_T))
    parts = []
    start = 0
    while start < len(tokens_T):
        chain = TokenTree.chain(tokens_T[start : start + next(sizes)])
        verify = model.verify(cache, [chain])
        cache.commit(verify, [range(len(chain))])
        parts.append(verify.logits)
        start += len(chain)
    return torch.cat(parts)


def assert_equal_logits(ours_TV: torch.Tensor, theirs_TV: torch.Tensor) -> None:
    tolerance = TOLERANCE * theirs_TV.abs().max().item()
    torch.testing.assert_close(ours_TV, theirs_TV, atol=tolerance, rtol=0)


@torch.no_grad()
def drops_entries(oracle: Any, tokens_T: Sequence[int]) -> bool:
    """Whether the indexer leaves some visible entry out.

    Asserts that no query's last chosen entry scores nearly as its first dropped one, where rounding could decide.
    """
    seen: list[torch.Tensor] = []
    scorers = [module for module in oracle.modules() if isinstance(module, DeepseekV4IndexerScorer)]
    hooks = [scorer.register_forward_hook(lambda *call: seen.append(call[2][0])) for scorer in scorers]
    oracle_logits(oracle, [tokens_T])
    for hook in hooks:
        hook.remove()
    rate, topk, dropped = oracle.config.compress_rates[CSA], oracle.config.index_topk, False
    for scores_TS in seen:
        for position, scores_S in enumerate(scores_TS):
            visible_S = scores_S[: (position + 1) // rate].sort(descending=True).values
            if len(visible_S) > topk:
                dropped = True
                gap = (visible_S[topk - 1] - visible_S[topk]).item()
                assert gap > 2e-6 * scores_TS.abs().max().item(), f"choose another seed: near tie at {position}"
    return dropped


def random_tokens(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(vocab_size), k=length)


CASES = {
    "window": Case(ratios=(0, 0)),
    "csa": Case(ratios=(4, 4)),
    "hca16": Case(ratios=(16, 16)),
    "mixed": Case(ratios=(0, 4, 16, 4)),
    "hca8_csa_window": Case(ratios=(8, 4, 0), overrides={"num_hash_layers": 3}),
    "no_hash_layers": Case(ratios=(4, 16), overrides={"num_hash_layers": 0}),
    "csa_first_topk_3": Case(ratios=(4, 16, 4), overrides={"index_topk": 3, "sliding_window": 7}),
    "no_yarn": Case(ratios=(4, 16), overrides={"rope_scaling": None}),
    "active_clamp": Case(ratios=(4, 16), overrides={"swiglu_limit": 0.4, "routed_scaling_factor": 2.5}),
    "streams": Case(ratios=(0, 4, 16), overrides={"hc_mult": 2, "hc_sinkhorn_iters": 3, "hc_eps": 1e-3}),
    "heads": Case(ratios=(4, 16), overrides={"num_attention_heads": 8, "o_groups": 8, "index_n_heads": 24}),
    "experts": Case(ratios=(0, 4, 16), overrides={"n_routed_experts": 8, "num_experts_per_tok": 5}),
    "fp4": Case(ratios=(0, 4, 16, 4), experts="fp4"),
    "fp8": Case(ratios=(0, 4, 16, 4), experts="fp8"),
    "base_fp8": Case(ratios=(0, 4, 16, 4), experts="fp8", scale_dtype="f32"),
    "fp8_many_blocks": Case(ratios=(4, 16), experts="fp8", overrides={"hidden_size": 256, "q_lora_rank": 128}),
    "transformers_layout": Case(ratios=(0, 4, 16, 4), layout="transformers"),
    "hca128": Case(
        ratios=(128, 4, 128),
        length=4 * 128 + 3,
        overrides={
            "layer_types": None,  # a released checkpoint's config: compress_ratios alone
            "compress_rates": None,
            "hidden_size": 64,
            "moe_intermediate_size": 32,
            "num_attention_heads": 2,
            "head_dim": 32,
            "q_lora_rank": 32,
            "vocab_size": 300,
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_position_equals_transformers(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = case.make(tmp_path)
    oracle, model = load_oracle(folder), load_model(folder, progress=False)
    tokens_T = random_tokens(case.length, model.vocab_size)
    assert drops_entries(oracle, tokens_T) == (4 in case.ratios)
    theirs_TV = oracle_logits(oracle, [tokens_T])[0]
    assert_equal_logits(engine_logits(model, tokens_T, itertools.repeat(case.length)), theirs_TV)
    assert_equal_logits(engine_logits(model, tokens_T, itertools.cycle((5, 1, 16, 1, 1, 3, 29))), theirs_TV)


@pytest.mark.parametrize("prefill_chunk", [1, 7, 256])
def test_prefill_in_chunks_equals_transformers(prefill_chunk: int, tmp_path: Path) -> None:
    folder = CASES["csa_first_topk_3"].make(tmp_path)
    oracle, model = load_oracle(folder), load_model(folder, progress=False)
    prompts = [random_tokens(length, model.vocab_size, seed=length) for length in (1, 18, 41)]
    cache = model.new_cache(batch_size=3, max_length=41, prefill_chunk=prefill_chunk)
    for ours_V, prompt in zip(model.prefill(cache, prompts), prompts, strict=True):
        drops_entries(oracle, prompt)
        assert_equal_logits(ours_V, oracle_logits(oracle, [prompt])[0, -1])


def random_tree(num_nodes: int, vocab_size: int, rng: random.Random) -> TokenTree:
    """Any topology: parents among the last few nodes, so that there are deep paths as well as broad levels."""
    parents = [-1, *(rng.randrange(max(node - 4, 0), node) for node in range(1, num_nodes))]
    return TokenTree(tokens=rng.choices(range(vocab_size), k=num_nodes), parents=parents)


def oracle_tree_logits(oracle: Any, prefix: Sequence[int], tree: TokenTree) -> torch.Tensor:
    """Logits `[N, V]` at each node: those after prefix + path, each path in a fresh forward of its own."""
    depths = tree.depths
    logits_NV = torch.empty(len(tree), oracle.config.vocab_size)
    for depth in range(max(depths) + 1):
        nodes = [node for node, its in enumerate(depths) if its == depth]
        paths = [[*prefix, *(tree.tokens[node] for node in tree.path_to(node))] for node in nodes]
        logits_NV[nodes] = oracle_logits(oracle, paths)[:, -1]
    return logits_NV


@pytest.mark.parametrize("name", ["window", "csa", "hca16", "mixed", "csa_first_topk_3"])
def test_every_tree_node_equals_transformers(name: str, tmp_path: Path) -> None:
    """Random trees on two rows at once; a random path of each is accepted, and the next trees grow from there."""
    folder = CASES[name].make(tmp_path)
    oracle, model = load_oracle(folder), load_model(folder, progress=False)
    rng = random.Random(0)
    texts = [random_tokens(length, model.vocab_size) for length in (11, 70)]
    cache = model.new_cache(batch_size=2, max_length=160)
    model.prefill(cache, texts)
    for _ in range(5):
        trees = [random_tree(14, model.vocab_size, rng) for _ in texts]
        verify = model.verify(cache, trees)
        for text, tree, ours_NV in zip(texts, trees, verify.logits.split(14), strict=True):
            assert_equal_logits(ours_NV, oracle_tree_logits(oracle, text, tree))
        paths = [tree.path_to(rng.randrange(14)) for tree in trees]
        cache.commit(verify, paths)
        for text, tree, path in zip(texts, trees, paths, strict=True):
            text += [tree.tokens[node] for node in path]
    assert cache.lengths == tuple(map(len, texts))


def randomize(model: torch.nn.Module) -> None:
    """Weights that make every part matter; transformers' own start is almost uniform."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.1)
        else:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.3)


@pytest.mark.parametrize("save_original_format", [True, False])
def test_checkpoint_saved_by_transformers(save_original_format: bool, tmp_path: Path) -> None:
    """Its own layout, from its own config: rates that upstream's key cannot say, and layers hash-routed anywhere."""
    config = DeepseekV4Config(
        vocab_size=300,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        o_lora_rank=16,
        o_groups=2,
        n_routed_experts=4,
        num_experts_per_tok=2,
        layer_types=[CSA, HCA, SLIDING, CSA],
        mlp_layer_types=["hash_moe", "moe", "hash_moe", "moe"],
        compress_rates={CSA: 8, HCA: 24},
        sliding_window=10,
        index_n_heads=16,
        index_head_dim=32,
        index_topk=5,
        max_position_embeddings=4096,
        rope_scaling={"type": "yarn", "factor": 4, "original_max_position_embeddings": 512},
    )
    config._attn_implementation = "eager"
    oracle = DeepseekV4ForCausalLM(config).float().eval()
    randomize(oracle)
    for name, table in oracle.named_buffers():
        if name.endswith("tid2eid"):
            table.copy_(torch.rand(300, 4).argsort(dim=1)[:, :2])
    oracle.save_pretrained(tmp_path, save_original_format=save_original_format)
    model = load_model(tmp_path, progress=False)
    tokens_T = random_tokens(110, 300)
    assert drops_entries(oracle, tokens_T)
    theirs_TV = oracle_logits(oracle, [tokens_T])[0]
    assert_equal_logits(engine_logits(model, tokens_T, itertools.cycle((7, 1, 30, 2))), theirs_TV)
