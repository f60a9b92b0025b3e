"""Hyper-connections as Triton kernels, against the references in float64."""

from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressed_spec.kernels import hyper_connection as plain
from compressed_spec.kernels import hyper_connection_triton as ours
from compressed_spec.kernels.numerics import numerics_named
from compressed_spec.testing.exactness import assert_as_exact_as

FAST = numerics_named("fast")


def everything(kernels: ModuleType, tensors: list[torch.Tensor], iterations: int) -> dict[str, torch.Tensor]:
    """All that a site and the head compute."""
    streams_TMD, output_TD, fn, scale, base = tensors
    num_streams = streams_TMD.shape[1]
    mix = kernels.mix_weights(
        streams_TMD, fn, scale, base, iterations=iterations, eps=1e-6, norm_eps=1e-6, numerics=FAST
    )
    head_TM = kernels.head_weights(
        streams_TMD, fn[:num_streams], scale[:1], base[:num_streams], eps=1e-6, norm_eps=1e-6, numerics=FAST
    )
    return {
        "pre": mix.pre_TM,
        "post": mix.post_TM,
        "comb": mix.comb_TMM,
        "head": head_TM,
        "collapsed": kernels.collapse(streams_TMD, mix.pre_TM),
        "expanded": kernels.expand(output_TD, streams_TMD, mix, FAST),
    }


@settings(max_examples=12, deadline=None)
@given(
    num_nodes=st.sampled_from([0, 1, 3, 17]),
    num_streams=st.sampled_from([1, 3, 4]),
    width=st.sampled_from([8, 100]),
    iterations=st.sampled_from([1, 20]),
    dtype=st.sampled_from([torch.float32, torch.float16]),
    seed=st.integers(0, 99),
)
def test_equal_the_references(
    device: torch.device, num_nodes: int, num_streams: int, width: int, iterations: int, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    num_mixed = num_streams * (num_streams + 2)
    num_compared = num_nodes + 64  # of torch's results, whose error is the measure
    tensors = [
        torch.randn(num_compared, num_streams, width, dtype=dtype),
        torch.randn(num_compared, width, dtype=dtype),
        torch.randn(num_mixed, num_streams * width) * 0.2,
        torch.randn(3),
        torch.randn(num_mixed),
    ]
    on_device = [tensor.to(device) for tensor in (*(rows[:num_nodes] for rows in tensors[:2]), *tensors[2:])]
    exact = everything(plain, [tensor.double() for tensor in tensors], iterations)
    ordinary = everything(plain, tensors, iterations)
    results = everything(ours, on_device, iterations)
    for name, result in results.items():
        assert_as_exact_as(result.cpu(), ordinary[name], exact[name])

    streams, _, fn, scale, base = on_device
    fused = ours.mix_and_collapse(streams, fn, scale, base, iterations=iterations, eps=1e-6, norm_eps=1e-6)
    assert torch.equal(fused.input_TD, results["collapsed"])
    assert torch.equal(fused.weights.comb_TMM, results["comb"])


@pytest.mark.parametrize("num_tiles", [1, 5, 400])
@pytest.mark.parametrize("num_blocks", [1, 7, 128, 224])
def test_parts_cover_the_inner_axis_once(num_tiles: int, num_blocks: int) -> None:
    num_parts, blocks_a_part = ours.parts_of(num_tiles, num_blocks, 132)
    assert (num_parts - 1) * blocks_a_part < num_blocks <= num_parts * blocks_a_part
