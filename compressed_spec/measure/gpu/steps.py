"""Whole verify steps of a model of V4-Flash's dimensions: how they grow with trees and batches, and what is in them.

T = nodes, B = trees
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from compressed_spec.cache import Cache
from compressed_spec.device_trees import DeviceTrees, RoundInputs
from compressed_spec.measure.gpu.random_flash import filled_cache
from compressed_spec.measure.gpu.scale import Scale
from compressed_spec.measure.gpu.timing import seconds
from compressed_spec.models.deepseek_v4.device_forward import DeviceForward
from compressed_spec.models.deepseek_v4.device_round import DeviceRound
from compressed_spec.models.deepseek_v4.layer_ops import triton_ops
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.quantized import QuantizedMoE


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of one round. form: "chain" or "tree". experts: the routed and shared ones of all layers, with routing.
    bookkeeping: plan and commit.
    """

    form: str
    nodes: int
    batch: int
    step: float
    experts: float
    bookkeeping: float

    @property
    def outside_experts(self) -> float:
        return self.step - self.experts


def chain(size: int) -> list[int]:
    return list(range(-1, size - 1))


def tree(size: int) -> list[int]:
    """Two children a node, level by level."""
    return [-1] + [(node - 1) // 2 for node in range(1, size)]


def step_times(model: DeepseekV4, scale: Scale, device: torch.device, deadline: float) -> Iterator[StepTime]:
    """Chains of every size and batch, trees of the largest size; ends early at `deadline` (time.monotonic)."""
    most_nodes = scale.tree_sizes[-1] * scale.batches[-1]
    cache = filled_cache(model, scale.batches[-1], scale.context + 4096, most_nodes + 1)
    for batch in scale.batches:
        for size in scale.tree_sizes:
            for name, form in (("chain", chain(size)), ("tree", tree(size))):
                if name == "tree" and size < scale.tree_sizes[-1]:
                    continue
                if time.monotonic() > deadline:
                    return
                yield _step(model, cache, scale, name, form, batch, device)


def _step(
    model: DeepseekV4, cache: Cache, scale: Scale, name: str, form: Sequence[int], batch: int, device: torch.device
) -> StepTime:
    carried = DeviceRound(DeviceForward(model, cache, triton_ops()))
    carried.lengths_B.fill_(scale.context)
    trees = DeviceTrees.of([form] * batch, cache.spec, device)
    num_nodes = batch * len(form)
    inputs = RoundInputs(
        rows_B=torch.arange(batch, device=device),
        tokens_T=torch.randint(0, model.vocab_size, (num_nodes,), device=device),
        temperature_T=torch.ones(num_nodes, dtype=torch.float64, device=device),
        seeds_T=torch.arange(num_nodes, device=device),
    )
    most_length = scale.context + 2048
    step = seconds(lambda: carried(trees, inputs, most_length), device)
    carried.lengths_B.fill_(scale.context)

    x_TD = torch.randn(num_nodes, model.config.hidden_size, device=device).to(scale.dtype)
    layers = [module for module in model.layers.modules() if isinstance(module, QuantizedMoE)]
    assert len(layers) == len(model.layers), "every layer has packed experts"
    experts = seconds(lambda: [ffn(x_TD, ffn.route(x_TD, inputs.tokens_T)) for ffn in layers], device)
    path_BA = trees.first_B1[:-1].unsqueeze(1).expand(-1, trees.longest).contiguous()
    bookkeeping = seconds(lambda: carried.commit(carried.plan(trees, inputs, most_length), trees, path_BA), device)
    return StepTime(form=name, nodes=len(form), batch=batch, step=step, experts=experts, bookkeeping=bookkeeping)
