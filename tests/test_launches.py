"""How many kernels a layer and a round launch: stated in docs/kernels.md, counted here."""

import torch

from compressed_spec.measure.gpu.scale import dry_scale
from compressed_spec.measure.gpu.random_flash import filled_cache, random_flash
from compressed_spec.models.deepseek_v4.device_forward import DeviceForward
from compressed_spec.models.deepseek_v4.device_plan import DeviceTrees
from compressed_spec.models.deepseek_v4.device_round import DeviceRound, RoundInputs
from compressed_spec.models.deepseek_v4.layer_ops import triton_ops
from compressed_spec.models.deepseek_v4.quantized import QuantizedKernels
from compressed_spec.kernels import fp4_experts_triton, fp8_linear_triton
from compressed_spec.testing.launches import count_launches


def test_try() -> None:
    scale = dry_scale()
    kernels = QuantizedKernels(linear=fp8_linear_triton.fp8_linear, experts=fp4_experts_triton.fp4_experts)
    counts = {}
    for ratios in ((), (0,), (4,), (128,)):
        pass
    model = random_flash(scale.config((0, 4, 128)), scale.dtype, kernels, torch.device("cpu"))
    cache = filled_cache(model, 1, 600, 5)
    forward = DeviceForward(model, cache, triton_ops())
    carried = DeviceRound(forward)
    trees = DeviceTrees.of([[-1, 0, 0]], cache.spec, cache.device)
    inputs = RoundInputs(
        rows_B=torch.tensor([0]),
        tokens_T=torch.tensor([1, 2, 3]),
        temperature_T=torch.ones(3, dtype=torch.float64),
        seeds_T=torch.arange(3),
    )
    carried.lengths_B.fill_(300)
    with count_launches() as counts:
        plan = carried.plan(trees, inputs, 300)
    print("plan", sum(counts.values()), dict(counts))
    seen = []
    original = forward.layer

    def layer(index, streams, here):
        with count_launches() as counts:
            out = original(index, streams, here)
        seen.append(counts)
        return out

    forward.layer = layer
    with count_launches() as counts:
        forward(plan)
    for c in seen:
        print(sum(c.values()), sum(v for k, v in c.items() if not k.startswith("torch.")), dict(c))
    print("outside", sum(counts.values()), dict(counts))
    with count_launches() as counts:
        carried.commit(plan, trees, torch.tensor([[0, 1]]))
    print("commit", sum(counts.values()), dict(counts))
    assert 0
