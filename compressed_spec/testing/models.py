"""Tiny random models, and the plainest way to run one: a token at a time.

V = vocabulary
"""

import random
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch

from compressed_spec.cache import Cache
from compressed_spec.models.deepseek_v4.config import parse_config
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.names import DraftHeadKind
from compressed_spec.models.deepseek_v4.tiny_tensors import random_tensor
from compressed_spec.target import TargetModel
from compressed_spec.tree import TokenTree

# What a DSpark head adds to `tiny_config`; for stacks of two layers or more.
DSPARK_KEYS: dict[str, object] = {
    "dspark_block_size": 4,
    "dspark_noise_token_id": 2,
    "dspark_target_layer_ids": [0, 1],
    "dspark_markov_rank": 8,
}


def tiny_config(compress_ratios: Sequence[int] | None = (0, 4, 8, 4), **overrides: object) -> dict[str, object]:
    """A config.json (parsed) that runs in milliseconds and in which window, entries and selection are soon exceeded.

    compress_ratios: one a layer (0 sliding, 4 CSA, else HCA); None where `overrides` bring `layer_types` instead.
    overrides: config.json keys in place of the defaults.
    """
    raw: dict[str, object] = {
        "model_type": "deepseek_v4",
        "vocab_size": 48,
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 4,
        "head_dim": 16,
        "qk_rope_head_dim": 4,
        "q_lora_rank": 16,
        "o_lora_rank": 8,
        "o_groups": 2,
        "sliding_window": 8,
        "index_n_heads": 16,
        "index_head_dim": 8,
        "index_topk": 3,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "num_hash_layers": 1,
        "routed_scaling_factor": 1.5,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 3,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 32},
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if compress_ratios is not None:
        raw |= {"compress_ratios": list(compress_ratios), "num_hidden_layers": len(compress_ratios)}
    return raw | overrides


def random_model(
    compress_ratios: Sequence[int] | None = (0, 4, 8, 4),
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    draft_head: DraftHeadKind = DraftHeadKind.MTP,
    num_draft_layers: int = 1,
    numerics: str = "fast",
    fp8_rows: bool = False,
    **overrides: object,
) -> DeepseekV4:
    """A model of `tiny_config`, every parameter random and none of them trivial; a function of the arguments alone."""
    if draft_head is DraftHeadKind.DSPARK:
        overrides = DSPARK_KEYS | overrides
    config = parse_config(tiny_config(compress_ratios, **overrides))
    model = DeepseekV4(
        config,
        draft_head=draft_head,
        num_draft_layers=num_draft_layers,
        dtype=dtype,
        numerics=numerics,
        fp8_rows=fp8_rows,
    )
    for name, tensor in model.state_dict().items():
        tensor.copy_(random_tensor(name, tuple(tensor.shape), config, seed))
    return model.eval().requires_grad_(False)


def greedy_text(model: TargetModel, prompt_ids: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that plain greedy decoding emits, one forward a token. Stops for nothing."""
    cache = model.new_cache(max_length=len(prompt_ids) + count, max_nodes=1, prefill_chunk=1, max_draft_nodes=1)
    logits_V = model.prefill(cache, [prompt_ids])[0]
    text = [int(logits_V.argmax())]
    while len(text) < count:
        verify = model.verify(cache, [TokenTree(tokens=[text[-1]], parents=[-1])])
        cache.commit(verify, [[0]])
        text.append(int(verify.logits[0].argmax()))
    return text


def random_text(count: int, *, vocab_size: int = 48, seed: int = 0) -> list[int]:
    """`count` random token ids; the same seed draws the same ids, and a longer text continues a shorter one."""
    rng = random.Random(seed)
    return [rng.randrange(vocab_size) for _ in range(count)]


def prefilled(
    model: TargetModel, texts: Sequence[Sequence[int]], *, max_length: int = 128, max_nodes: int = 64
) -> Cache:
    """A cache with one row a text, filled with it. The texts run through one prefill, all rows together."""
    cache = model.new_cache(batch_size=len(texts), max_length=max_length, max_nodes=max_nodes)
    model.prefill(cache, texts)
    return cache


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceState:
    """Where a one-token-at-a-time run stands: logits `[V]` after its last token, and its cache (one row)."""

    logits_V: torch.Tensor
    cache: Cache


class Reference:
    """Runs token sequences one token at a time in caches of their own, and remembers every prefix it has run.

    It uses no tree, no chunk and no batch, and copies state by copying whole pools.
    """

    def __init__(self, model: TargetModel, max_length: int = 128) -> None:
        self.model, self._max_length = model, max_length
        self._states: dict[tuple[int, ...], ReferenceState] = {}

    def after(self, token_ids: Sequence[int]) -> ReferenceState:
        """The state after these tokens (at least one); not to be modified."""
        tokens = tuple(token_ids)
        known = next((n for n in range(len(tokens), 0, -1) if tokens[:n] in self._states), 0)
        for n in range(known, len(tokens)):
            if n:
                cache = deepcopy(self._states[tokens[:n]].cache)
            else:
                cache = self.model.new_cache(
                    max_length=self._max_length, max_nodes=1, prefill_chunk=1, max_draft_nodes=1
                )
            verify = self.model.verify(cache, [TokenTree(tokens=[tokens[n]], parents=[-1])])
            cache.commit(verify, [[0]])
            self._states[tokens[: n + 1]] = ReferenceState(logits_V=verify.logits[0], cache=cache)
        return self._states[tokens]
