"""Coupled tokens and tree walks on the device: bit for bit the host's."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from compressed_spec.kernels.coupled_triton import coupled_tokens, gumbel, walk_trees
from compressed_spec.noise import gumbel_noise, seed_tensor
from compressed_spec.sampling import select_tokens, target_tokens
from compressed_spec.sampling_params import SamplingParams
from compressed_spec.tree import TokenTree
from compressed_spec.verifying import walk

ROOT = Path(__file__).resolve().parent.parent.parent
SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 0x9E3779B97F4A7C15]


@triton.jit
def noise_kernel(p_seed, p_position, p_out, V: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.arange(0, BLOCK).to(tl.int64)
    noise = gumbel(tl.load(p_seed + tl.program_id(0)), tl.load(p_position + tl.program_id(0)), token)
    tl.store(p_out + tl.program_id(0) * V + token, noise, mask=token < V)


def test_noise_has_the_same_bits() -> None:
    seeds_N, positions_N = seed_tensor(SEEDS), torch.tensor([0, 1, 7, 2**31, 2**40, 129279])
    noise_NV = torch.empty((len(SEEDS), 3000), dtype=torch.float64)
    noise_kernel[(len(SEEDS),)](seeds_N, positions_N, noise_NV, V=3000, BLOCK=4096)
    assert torch.equal(noise_NV.view(torch.int64), gumbel_noise(seeds_N, positions_N, 3000).view(torch.int64))


@pytest.mark.parametrize("vocab", [1, 5, 513, 9001])
def test_tokens_of_log_probabilities_are_select_tokens(vocab: int) -> None:
    seeds_N, positions_N = seed_tensor(SEEDS), torch.arange(len(SEEDS))
    log_p_NV = torch.log_softmax(3 * torch.randn(len(SEEDS), vocab, dtype=torch.float64), dim=-1)
    log_p_NV[:, 1::3] = -torch.inf
    ones_N = torch.ones(len(SEEDS), dtype=torch.float64)
    actual = coupled_tokens(log_p_NV, ones_N, torch.zeros_like(ones_N), seeds_N, positions_N)
    assert torch.equal(actual, select_tokens(log_p_NV, seeds_N, positions_N))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16])
def test_tokens_of_logits_are_the_targets(dtype: torch.dtype) -> None:
    logits_NV = (4 * torch.randn(6, 5000)).to(dtype)
    params = [
        SamplingParams(temperature=t, seed=s) for t, s in zip([0.0, 1.0, 0.3, 2.0, 1e-9, 0.0], SEEDS, strict=True)
    ]
    positions_N = torch.arange(6) * 1000
    actual = coupled_tokens(
        logits_NV,
        torch.tensor([p.temperature for p in params], dtype=torch.float64),
        logits_NV.amax(-1).double(),
        seed_tensor(SEEDS),
        positions_N,
    )
    assert torch.equal(actual, target_tokens(logits_NV, params, positions_N))


def test_ties_go_to_the_smallest_token() -> None:
    scores_NV = torch.zeros(2, 9000)
    scores_NV[0, [8999, 4200, 77]] = 1.0
    scores_NV[1, [8999, 4200]] = 1.0
    zeros_N, seeds_N = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.int64)
    assert coupled_tokens(scores_NV, zeros_N, zeros_N, seeds_N, seeds_N).tolist() == [77, 4200]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_rows_without_a_best_token_are_marked(temperature: float) -> None:
    scores_NV = torch.randn(4, 6000)
    scores_NV[0, 5999] = torch.nan
    scores_NV[1, 3] = torch.inf
    scores_NV[2] = -torch.inf
    temperature_N, seeds_N = torch.full((4,), temperature, dtype=torch.float64), torch.arange(4)
    tokens = coupled_tokens(scores_NV, temperature_N, scores_NV.amax(-1).double(), seeds_N, seeds_N).tolist()
    assert tokens[:3] == [-1, -1, -1]
    assert tokens[3] >= 0


@settings(max_examples=12, deadline=None)
@given(sizes=st.lists(st.integers(1, 20), min_size=1, max_size=4), seed=st.integers(0, 2**32))
def test_walks_are_the_hosts(sizes: list[int], seed: int) -> None:
    """Few token ids, so that paths are long and siblings may carry the same token."""
    rng = random.Random(seed)
    trees = [
        TokenTree(
            tokens=[rng.randrange(3) for _ in range(size)],
            parents=[-1] + [rng.randrange(max(0, node - 3), node) for node in range(1, size)],
        )
        for size in sizes
    ]
    chosen = [[rng.randrange(3) for _ in range(size)] for size in sizes]
    firsts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    longest = max(max(tree.depths) for tree in trees) + 1
    done = walk_trees(
        torch.tensor([token for row in chosen for token in row]),
        torch.tensor([token for tree in trees for token in tree.tokens]),
        torch.tensor([-1 if p < 0 else f + p for f, tree in zip(firsts, trees, strict=False) for p in tree.parents]),
        torch.tensor(firsts),
        longest=longest,
        most_nodes=max(sizes),
    )
    for i, (tree, row) in enumerate(zip(trees, chosen, strict=True)):
        expected, count = walk(tree, row), int(done.count_B[i])
        assert [node - firsts[i] for node in done.path_BA[i, :count].tolist()] == list(expected.path)
        assert set(done.path_BA[i, count:].tolist()) <= {-1}
        assert int(done.next_token_B[i]) == expected.next_token


@pytest.mark.slow
def test_noise_is_compiled_without_fused_multiply_adds() -> None:
    """They would round once where the host rounds twice."""
    code = """
from triton.compiler import ASTSource
from triton.backends.compiler import GPUTarget
import triton
from compressed_spec.kernels.triton_cases_round import round_cases
case = next(case for case in round_cases() if case.name.startswith("coupled/best"))
constants = dict(case.constexprs)
options = {"enable_fp_fusion": constants.pop("enable_fp_fusion")}
types = {name: case.signature.get(name, "constexpr") for name in case.kernel.arg_names}
source, target = ASTSource(case.kernel, types, constants), GPUTarget("cuda", 90, 32)
ptx = triton.compile(source, target=target, options=options).asm["ptx"]
print("fma" in ptx, "mul.rn.f64" in ptx or "mul.f64" in ptx)
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.stdout.split() == ["False", "True"], result.stderr
