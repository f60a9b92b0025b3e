"""This machine's rates for a model, measured: nothing of the model itself is timed.

What does not depend on the size of matrices (launches, bookkeeping) is the time of a thin model: the same layers,
experts and lists, with matrices of a few elements. Rates are those of products, and of attention, at the model's width.
T = nodes, D = head width, H = heads, R = rows, K = rows listed, O = output width
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F

from compressed_spec.drafting import make_drafter
from compressed_spec.kernels.numerics import numerics_named
from compressed_spec.measure.planning.devices import Device
from compressed_spec.measure.planning.roofline import PlannedModel
from compressed_spec.measure.planning.storage import Rate
from compressed_spec.models.deepseek_v4.config import DeepseekV4Config
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.names import DraftHeadKind
from compressed_spec.models.deepseek_v4.tiny_tensors import random_tensor
from compressed_spec.shaping.profile import LONG_CONTEXT, profile_costs
from compressed_spec.tree import TreeShape

PROFILE_SHAPE = TreeShape(num_steps=4, top_k=3, num_nodes=16)
LARGEST_BATCH = 4  # of the profile: the terms are linear beyond
LARGEST_SET = 256 * 2**20  # bytes of weights to read, at most
THIN = {
    "hidden_size": 8,
    "head_dim": 8,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 4,
    "o_lora_rank": 4,
    "index_head_dim": 4,
    "moe_intermediate_size": 4,
}
THIN_VOCABULARY = 256
WIDTH = 1024  # of the matrices whose products are timed
MANY_ROWS = 256
ATTENTION_NODES = 16
REPEATS = 5


@torch.no_grad()
def measure_cpu(model: PlannedModel, batch_size: int) -> Device:
    """Rates of this machine at this number of threads, in float32, for batches of up to `batch_size`."""
    config = model.config
    num_matrices = max(2, min(model.weight_bytes, LARGEST_SET) // (4 * WIDTH**2))
    weights = [torch.rand(WIDTH, WIDTH) for _ in range(num_matrices)]
    one, many = torch.rand(1, WIDTH), torch.rand(MANY_ROWS, WIDTH)
    seconds = _fastest(lambda: [F.linear(one, weight) for weight in weights])
    many_seconds = _fastest(lambda: F.linear(many, weights[0]))
    thin = thin_model(config, model.draft_head, model.num_draft_layers)
    costs = profile_costs(
        thin,
        None if thin.own_drafter is None else make_drafter(thin.own_drafter, thin),
        batch_size=min(batch_size, LARGEST_BATCH),
        max_length=min(LONG_CONTEXT + PROFILE_SHAPE.num_nodes, config.max_position_embeddings),
        shape=PROFILE_SHAPE,
    )
    return Device(
        name="cpu",
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        bandwidth=num_matrices * 4 * WIDTH**2 / seconds,
        flops={Rate.FP32: 2 * MANY_ROWS * WIDTH**2 / many_seconds},
        overhead=costs,
        gather_bandwidth=_gather_bandwidth(config),
    )


def thin_model(config: DeepseekV4Config, draft_head: DraftHeadKind, num_draft_layers: int) -> DeepseekV4:
    """A random model of the same layers, heads, experts, window and lists, whose matrices have a few elements."""
    thin = replace(config, vocab_size=min(config.vocab_size, THIN_VOCABULARY), bos_token_id=None, **THIN)
    if thin.dspark is not None:
        thin = replace(thin, dspark=replace(thin.dspark, noise_token_id=0, markov_rank=4))
    made = DeepseekV4(thin, draft_head=draft_head, num_draft_layers=num_draft_layers, dtype=torch.float32)
    for name, tensor in made.state_dict().items():
        tensor.copy_(random_tensor(name, tuple(tensor.shape), thin, 0))
    return made.eval().requires_grad_(False)


def _gather_bandwidth(config: DeepseekV4Config) -> float:
    """Bytes of listed rows that attention gets through in a second, at the model's heads."""
    attention, listed = numerics_named("fast").attention, config.sliding_window

    def seconds(width: int) -> float:
        q_THD = torch.rand(ATTENTION_NODES, config.num_attention_heads, width)
        kv_RD, sink_H = torch.rand(2 * listed, width), torch.zeros(config.num_attention_heads)
        rows_TK = torch.randint(2 * listed, (ATTENTION_NODES, listed))
        return _fastest(lambda: attention(q_THD, kv_RD, rows_TK, None, None, sink_H))

    # What a head of a few elements takes is in the thin model's time already.
    spent = max(seconds(config.head_dim) - seconds(THIN["head_dim"]), 1e-9)
    return ATTENTION_NODES * listed * config.head_dim * 4 / spent


def _fastest(action: Callable[[], object]) -> float:
    action()
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
