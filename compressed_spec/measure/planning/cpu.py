"""This machine's rates for a model, measured: nothing of the model itself is timed.

What does not depend on the size of matrices (launches, bookkeeping) is the time of a thin model: the same layers,
experts and lists, with matrices of a few elements. To it come rates of products, of passes over activations and of
attention, each measured at the model's widths, less what the same takes at the thin model's.
T = nodes, D = head width, H = heads, R = rows, K = rows listed, I = inputs, O = outputs
"""

import os
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from compressed_spec.drafting import make_drafter
from compressed_spec.kernels.numerics import numerics_named
from compressed_spec.measure.planning.devices import Device, Overhead
from compressed_spec.measure.planning.roofline import PlannedModel
from compressed_spec.measure.planning.storage import Rate
from compressed_spec.measure.timing import fastest
from compressed_spec.models.deepseek_v4.config import DeepseekV4Config
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.names import DraftHeadKind
from compressed_spec.models.deepseek_v4.tiny_tensors import random_tensor
from compressed_spec.shaping.profile import LONG_CONTEXT, profile_costs
from compressed_spec.tree import TreeShape

PROFILE_SHAPE = TreeShape(num_steps=4, top_k=3, num_nodes=16)
LARGEST_BATCH = 4  # of the profile: the terms are linear beyond
LARGEST_SET = 64 * 2**20  # bytes of weights to read, at most
THIN_WIDTH, THIN_RANK = 8, 4  # of streams and heads; of everything else
THIN_VOCABULARY = 256
MANY_ROWS = 64
PROFILES = 3
NODES = 16  # of what is timed beside products
REPEATS = 7


@torch.no_grad()
def measure_cpu(model: PlannedModel, batch_size: int) -> Device:
    """Rates of this machine at this number of threads, in float32, for batches of up to `batch_size`."""
    config = model.config
    products = _products(config, min(model.weight_bytes, LARGEST_SET))
    thin = thin_model(config, model.draft_head, model.num_draft_layers)
    drafter = None if thin.own_drafter is None else make_drafter(thin.own_drafter, thin)
    num_rows = min(batch_size, LARGEST_BATCH)
    profiles = [
        profile_costs(
            thin,
            drafter,
            batch_size=num_rows,
            max_length=min(LONG_CONTEXT + PROFILE_SHAPE.num_nodes, config.max_position_embeddings),
            shape=PROFILE_SHAPE,
        )
        for _ in range(PROFILES)
    ]
    # What disturbs a machine only ever makes it slower.
    costs = min(profiles, key=lambda one: one.verify_seconds(num_rows, num_rows * 4, LONG_CONTEXT))
    return Device(
        name="cpu",
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        bandwidth=products.bandwidth,
        flops={Rate.FP32: products.flops},
        overhead=Overhead(num_layers=config.num_hidden_layers, verify=costs.verify, draft=costs.draft),
        gather_bandwidth=_gather_bandwidth(config),
        pass_bandwidth=_pass_bandwidth(config),
        overlaps=False,
        float32=True,
    )


def thin_model(config: DeepseekV4Config, draft_head: DraftHeadKind, num_draft_layers: int) -> DeepseekV4:
    """A random model of the same layers, heads, experts, window and lists, whose matrices have a few elements."""
    thin = replace(
        config,
        vocab_size=min(config.vocab_size, THIN_VOCABULARY),
        bos_token_id=None,
        hidden_size=THIN_WIDTH,
        head_dim=THIN_WIDTH,
        qk_rope_head_dim=THIN_RANK,
        q_lora_rank=THIN_RANK,
        o_lora_rank=THIN_RANK,
        index_head_dim=THIN_RANK,
        moe_intermediate_size=THIN_RANK,
    )
    if thin.dspark is not None:
        thin = replace(thin, dspark=replace(thin.dspark, noise_token_id=0, markov_rank=THIN_RANK))
    made = DeepseekV4(thin, draft_head=draft_head, num_draft_layers=num_draft_layers, dtype=torch.float32)
    for name, tensor in made.state_dict().items():
        tensor.copy_(random_tensor(name, tuple(tensor.shape), thin, 0))
    return made.eval().requires_grad_(False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Products:
    """Bytes of weights a second in products of one row, and operations a second that further rows add."""

    bandwidth: float
    flops: float


def _products(config: DeepseekV4Config, num_bytes: int) -> _Products:
    """With matrices of the shape of an expert's, so many that they take `num_bytes` together."""
    inputs, outputs = config.hidden_size, 2 * config.moe_intermediate_size
    count = max(2, num_bytes // (4 * inputs * outputs))
    weights = [torch.rand(outputs, inputs) for _ in range(count)]
    thin = torch.rand(THIN_WIDTH, THIN_WIDTH)

    def seconds(num_rows: int) -> float:
        """Of one product, without its launch."""
        x_TI, thin_TI = torch.rand(num_rows, inputs), torch.rand(num_rows, THIN_WIDTH)
        spent = fastest(lambda: [F.linear(x_TI, weight_OI) for weight_OI in weights], REPEATS)
        return (spent - fastest(lambda: [F.linear(thin_TI, thin) for _ in weights], REPEATS)) / count

    one, many = seconds(1), seconds(MANY_ROWS)
    flops = 2 * inputs * outputs * (MANY_ROWS - 1)
    return _Products(bandwidth=4 * inputs * outputs / max(one, 1e-9), flops=flops / max(many - one, 1e-9))


def _gather_bandwidth(config: DeepseekV4Config) -> float:
    """Bytes of listed rows that attention gets through in a second, at the model's heads."""
    attention, listed = numerics_named("fast").attention, config.sliding_window

    def seconds(width: int) -> float:
        q_THD = torch.rand(NODES, config.num_attention_heads, width)
        kv_RD, sink_H = torch.rand(2 * listed, width), torch.zeros(config.num_attention_heads)
        rows_TK = torch.randint(2 * listed, (NODES, listed))
        return fastest(lambda: attention(q_THD, kv_RD, rows_TK, None, None, sink_H), REPEATS)

    spent = seconds(config.head_dim) - seconds(THIN_WIDTH)
    return NODES * listed * config.head_dim * 4 / max(spent, 1e-9)


def _pass_bandwidth(config: DeepseekV4Config) -> float:
    """Bytes of activations a second that one operation passes over."""

    def seconds(width: int) -> float:
        x_TD, y_TD = torch.rand(2, NODES, config.hc_mult * width)
        return fastest(lambda: [(x_TD * y_TD).square() for _ in range(64)], REPEATS) / 128

    spent = seconds(config.hidden_size) - seconds(THIN_WIDTH)
    return NODES * config.hc_mult * config.hidden_size * 4 / max(spent, 1e-9)
