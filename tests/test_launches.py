"""How many kernels a layer and the rest of a round launch: as `DeviceForward` states them."""

from collections import Counter

import pytest
import torch

from compressed_spec.device_trees import DeviceTrees, RoundInputs
from compressed_spec.measure.gpu.random_flash import filled_cache, random_flash
from compressed_spec.measure.gpu.scale import dry_scale
from compressed_spec.models.deepseek_v4.device_forward import KERNELS_A_LAYER, DeviceForward
from compressed_spec.models.deepseek_v4.device_plan import KERNELS_A_PLAN
from compressed_spec.models.deepseek_v4.device_round import DeviceRound
from compressed_spec.models.deepseek_v4.layer_ops import triton_ops
from compressed_spec.models.deepseek_v4.quantized import triton_kernels
from compressed_spec.testing.launches import count_launches

RATIOS = (4, 0, 128, 4)  # two CSA layers, one sliding, one HCA; the first is hash-routed
CONTEXT = 300


@pytest.fixture(scope="module")
def carried() -> DeviceRound:
    scale = dry_scale()
    # In bfloat16, because conversions are kernels too; what the interpreter makes of it does not matter here.
    model = random_flash(scale.config(RATIOS), torch.bfloat16, triton_kernels(), torch.device("cpu"))
    cache = filled_cache(model, 1, 600, 5)
    return DeviceRound(DeviceForward(model, cache, triton_ops()))


def inputs(num_nodes: int) -> RoundInputs:
    return RoundInputs(
        rows_B=torch.tensor([0]),
        tokens_T=torch.arange(num_nodes),
        temperature_T=torch.ones(num_nodes, dtype=torch.float64),
        seeds_T=torch.arange(num_nodes),
    )


def test_kernels_a_layer(carried: DeviceRound, monkeypatch: pytest.MonkeyPatch) -> None:
    layers: list[Counter[str]] = []
    original = DeviceForward.layer

    def counted(self: DeviceForward, layer: int, *args: object) -> torch.Tensor:
        with count_launches() as counts:
            streams_TMD = original(self, layer, *args)  # type: ignore[arg-type]
        layers.append(counts)
        return streams_TMD

    monkeypatch.setattr(DeviceForward, "layer", counted)
    carried.lengths_B.fill_(CONTEXT)
    carried(DeviceTrees.of([[-1, 0, 0]], carried.spec, carried.device), inputs(3), CONTEXT)
    _, sliding, hca, csa = layers
    totals = {kind: sum(counts.values()) for kind, counts in (("sliding", sliding), ("hca", hca), ("csa", csa))}
    assert totals == KERNELS_A_LAYER, f"{dict(csa)}, {dict(hca)}"


@pytest.mark.slow
def test_the_number_does_not_depend_on_the_tree(carried: DeviceRound) -> None:
    totals = []
    for form in ([-1, 0], [-1, 0, 0, 1]):
        carried.lengths_B.fill_(CONTEXT)
        trees = DeviceTrees.of([form], carried.spec, carried.device)
        with count_launches() as counts:
            carried(trees, inputs(len(form)), CONTEXT)
        totals.append(sum(counts.values()))
    assert totals[0] == totals[1]


def test_plan_and_commit(carried: DeviceRound) -> None:
    carried.lengths_B.fill_(CONTEXT)
    trees, given = DeviceTrees.of([[-1, 0, 0]], carried.spec, carried.device), inputs(3)
    path_BA = torch.tensor([[0, 1]])
    with count_launches() as counts:
        plan = carried.plan(trees, given, CONTEXT)
    assert sum(counts.values()) == KERNELS_A_PLAN, dict(counts)
    with count_launches() as counts:
        carried.commit(plan, trees, path_BA)
    assert counts == {"commit_moves_kernel": 1, "commit_rows_kernel": 1}
