"""The same layers in transformers, on the same device: how far the logits are apart, and how long a step takes.

B = sequences, S = tokens, V = vocabulary
"""

from dataclasses import dataclass
from typing import Any

import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from compressed_spec.device_trees import DeviceTrees, RoundInputs
from compressed_spec.measure.gpu.random_flash import random_flash
from compressed_spec.measure.gpu.scale import Scale
from compressed_spec.measure.gpu.timing import seconds
from compressed_spec.models.deepseek_v4.device_forward import DeviceForward
from compressed_spec.models.deepseek_v4.device_round import DeviceRound
from compressed_spec.models.deepseek_v4.layer_ops import triton_ops
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.names import Layout, upstream_name
from compressed_spec.models.deepseek_v4.quantized import QuantizedExperts, QuantizedLinear, quantized_kernels

NUM_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class OracleReport:
    """Logits of a chain of tokens from an empty context, ours (Triton) and transformers', both against transformers'
    in float32. step, oracle_step: seconds of one forward of one more token for one sequence.
    """

    error: float
    oracle_error: float
    scale: float
    step: float
    oracle_step: float

    @property
    def passed(self) -> bool:
        """Whether ours are at most twice as far off as transformers' own in the same precision."""
        return self.error <= 2 * self.oracle_error + 1e-5 * self.scale


@torch.no_grad()
def compare_with_transformers(scale: Scale, device: torch.device) -> OracleReport:
    """Builds a model of few layers, and transformers' of the same weights, dequantised."""
    raw = scale.config(scale.oracle_ratios)
    model = random_flash(raw, scale.dtype, quantized_kernels(device), device)
    tokens_S = torch.arange(NUM_TOKENS, device=device) * 7 % model.vocab_size
    ours_SV = _our_logits(model, tokens_S)
    step = _our_step(model)
    oracle = _transformers_model(raw, model, scale.dtype, device)
    del model
    same_SV = oracle(tokens_S[None], use_cache=False).logits[0]
    oracle_step = _their_step(oracle, tokens_S)
    exact_SV = oracle.float()(tokens_S[None], use_cache=False).logits[0].double()
    return OracleReport(
        error=float((ours_SV.double() - exact_SV).abs().max()),
        oracle_error=float((same_SV.double() - exact_SV).abs().max()),
        scale=float(exact_SV.abs().max()),
        step=step,
        oracle_step=oracle_step,
    )


def _round_inputs(tokens_T: torch.Tensor) -> RoundInputs:
    num_nodes, device = len(tokens_T), tokens_T.device
    return RoundInputs(
        rows_B=torch.zeros(1, dtype=torch.int64, device=device),
        tokens_T=tokens_T,
        temperature_T=torch.zeros(num_nodes, dtype=torch.float64, device=device),
        seeds_T=torch.zeros(num_nodes, dtype=torch.int64, device=device),
    )


def _our_logits(model: DeepseekV4, tokens_S: torch.Tensor) -> torch.Tensor:
    cache = model.new_cache(batch_size=1, max_length=1024, max_nodes=len(tokens_S) + 1)
    carried = DeviceRound(DeviceForward(model, cache, triton_ops()))
    form = DeviceTrees.of([list(range(-1, len(tokens_S) - 1))], cache.spec, cache.device)
    return carried(form, _round_inputs(tokens_S), 0).logits_TV


def _our_step(model: DeepseekV4) -> float:
    cache = model.new_cache(batch_size=1, max_length=1024, max_nodes=2)
    for pool in cache.pools.values():
        pool.zero_()
    carried = DeviceRound(DeviceForward(model, cache, triton_ops()))
    carried.lengths_B.fill_(NUM_TOKENS)
    form = DeviceTrees.of([[-1]], cache.spec, cache.device)
    inputs = _round_inputs(torch.zeros(1, dtype=torch.int64, device=cache.device))
    return seconds(lambda: carried(form, inputs, 512), cache.device)


def _decoded(model: DeepseekV4, name: str) -> torch.Tensor:
    """A parameter of the plain model, by its name."""
    owner, _, leaf = name.rpartition(".")
    if leaf in ("w13", "w2"):
        experts = model.get_submodule(owner)
        assert isinstance(experts, QuantizedExperts)
        packed, dtype = experts.packed, model.precision.dtype
        decoded = (packed.decoded(expert) for expert in range(len(packed.w2)))
        return torch.stack([(w13 if leaf == "w13" else w2).to(dtype) for w13, w2 in decoded])
    module = model.get_submodule(owner)
    if isinstance(module, QuantizedLinear):
        return module.stored.decoded(model.precision.dtype)
    return model.get_buffer(name) if leaf == "tid2eid" else model.get_parameter(name)


def _transformers_model(raw: dict[str, Any], model: DeepseekV4, dtype: torch.dtype, device: torch.device) -> Any:
    """Their model with our weights, decoded one at a time."""
    with device:
        oracle = DeepseekV4ForCausalLM._from_config(DeepseekV4Config(**raw), dtype=dtype, attn_implementation="eager")
    for name, tensor in oracle.state_dict().items():
        upstream = upstream_name(name, Layout.TRANSFORMERS)
        tensor.copy_(_decoded(model, upstream.removesuffix(".weight") if ".experts.w" in upstream else upstream))
    return oracle.eval()


def _their_step(oracle: Any, tokens_S: torch.Tensor) -> float:
    """One token more, without a graph: their cache grows, which a graph cannot record."""
    device = tokens_S.device
    cache = oracle(tokens_S[None], use_cache=True).past_key_values
    times: list[float] = []
    for _ in range(8 if device.type == "cuda" else 2):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            oracle(tokens_S[None, :1], past_key_values=cache, use_cache=True)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e-3)
        else:
            times.append(seconds(lambda: oracle(tokens_S[None, :1], past_key_values=cache, use_cache=True), device))
    return sorted(times)[len(times) // 2]
