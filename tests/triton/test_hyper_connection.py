"""Hyper-connections as Triton kernels, against the references in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressed_spec.kernels import hyper_connection as plain
from compressed_spec.kernels import hyper_connection_triton as ours
from compressed_spec.kernels.numerics import numerics_named
from compressed_spec.testing.exactness import assert_as_exact_as

FAST = numerics_named("fast")


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
    streams_TMD = torch.randn(num_nodes, num_streams, width, dtype=dtype)
    output_TD = torch.randn(num_nodes, width, dtype=dtype)
    num_mixed = num_streams * (num_streams + 2)
    fn, base, scale = torch.randn(num_mixed, num_streams * width) * 0.2, torch.randn(num_mixed), torch.randn(3)

    def all_of(kernels, *tensors):
        streams, output, fn, scale, base = tensors
        mix = kernels.mix_weights(streams, fn, scale, base, iterations=iterations, eps=1e-6, norm_eps=1e-6, numerics=FAST)
        head = kernels.head_weights(
            streams, fn[:num_streams], scale[:1], base[:num_streams], eps=1e-6, norm_eps=1e-6, numerics=FAST
        )
        collapsed = kernels.collapse(streams, mix.pre_TM)
        expanded = kernels.expand(output, streams, mix, FAST)
        return mix.pre_TM, mix.post_TM, mix.comb_TMM, head, collapsed, expanded

    tensors = (streams_TMD, output_TD, fn, scale, base)
    exact = all_of(plain, *(tensor.double() for tensor in tensors))
    ref = all_of(plain, *tensors)
    got = all_of(ours, *(tensor.to(device) for tensor in tensors))
    for a, b, c in zip(got, ref, exact, strict=True):
        assert_as_exact_as(a.cpu(), b, c)
    fused = ours.mix_and_collapse(*(tensor.to(device) for tensor in (streams_TMD, fn, scale, base)), iterations=iterations, eps=1e-6, norm_eps=1e-6)
    assert torch.equal(fused.input_TD.cpu(), got[4].cpu())
    assert torch.equal(fused.weights.comb_TMM.cpu(), got[2].cpu())
