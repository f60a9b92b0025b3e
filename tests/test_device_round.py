"""Rounds that the host does not see are the host's rounds: logits, paths, tokens, lengths and state."""

import random
from collections.abc import Sequence
from copy import deepcopy

import pytest
import torch

from compressed_spec.cache import Cache
from compressed_spec.device_trees import DeviceTrees, RoundInputs
from compressed_spec.models.deepseek_v4.device_forward import DeviceForward
from compressed_spec.models.deepseek_v4.device_round import DeviceRound
from compressed_spec.models.deepseek_v4.layer_ops import LayerOps, torch_ops, triton_ops
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.names import DraftHeadKind
from compressed_spec.noise import seed_tensor
from compressed_spec.sampling import target_tokens
from compressed_spec.sampling_params import SamplingParams
from compressed_spec.testing.models import random_model, random_text
from compressed_spec.testing.state import assert_near, assert_same_state, live_state, poison
from compressed_spec.tree import TokenTree
from compressed_spec.verifying import walk

FORMS = ([-1, 0, 0, 1, 1, 2, 3], [-1, 0, 1, 2])
PARAMS = (SamplingParams(temperature=0.0, seed=1), SamplingParams(temperature=0.8, seed=7))
ROWS = (2, 0)


def host_choice(model: DeepseekV4, cache: Cache, trees: Sequence[TokenTree]) -> tuple[torch.Tensor, list[int]]:
    """Logits of all nodes, and the target's token after each."""
    logits_TV = model.verify(cache, trees, rows=ROWS).logits
    params = [p for p, tree in zip(PARAMS, trees, strict=True) for _ in range(len(tree))]
    positions = [cache.lengths[r] + 1 + depth for r, tree in zip(ROWS, trees, strict=True) for depth in tree.depths]
    return logits_TV, target_tokens(logits_TV, params, torch.tensor(positions)).tolist()


def likely_trees(model: DeepseekV4, cache: Cache, roots: Sequence[int], rng: random.Random) -> list[TokenTree]:
    """Trees of the given forms some of whose nodes carry the target's own token."""
    tokens = [[root] + [rng.randrange(48) for _ in form[1:]] for root, form in zip(roots, FORMS, strict=True)]
    lucky = [[rng.random() < 0.6 for _ in form] for form in FORMS]
    for _ in range(3):  # a level of each tree at a time
        trees = [TokenTree(tokens=t, parents=form) for t, form in zip(tokens, FORMS, strict=True)]
        _, chosen = host_choice(model, deepcopy(cache), trees)
        first = 0
        for i, form in enumerate(FORMS):
            for node in range(1, len(form)):
                if lucky[i][node]:
                    tokens[i][node] = chosen[first + form[node]]
            first += len(form)
    return [TokenTree(tokens=t, parents=form) for t, form in zip(tokens, FORMS, strict=True)]


def check_rounds(ops: LayerOps, model: DeepseekV4, lengths: Sequence[int], num_rounds: int, tolerance: float) -> int:
    """Run the same rounds on the host and without it; returns the tokens accepted beyond the roots."""
    rng = random.Random(3)
    cache = model.new_cache(batch_size=3, max_length=96, max_nodes=16, prefill_chunk=16)
    logits_BV = model.prefill(cache, [random_text(n, seed=n) for n in lengths], rows=list(ROWS))
    roots = logits_BV.argmax(-1).tolist()
    poison(cache)
    beside = deepcopy(cache)
    carried = DeviceRound(DeviceForward(model, beside, ops))
    form = DeviceTrees.of(FORMS, cache.spec, cache.device)
    sizes = [len(f) for f in FORMS]
    of_node = [p for p, n in zip(PARAMS, sizes, strict=True) for _ in range(n)]
    accepted = 0
    for _ in range(num_rounds):
        trees = likely_trees(model, cache, roots, rng)
        outputs = carried(
            form,
            RoundInputs(
                rows_B=torch.tensor(ROWS),
                tokens_T=torch.tensor([token for tree in trees for token in tree.tokens]),
                temperature_T=torch.tensor([p.temperature for p in of_node], dtype=torch.float64),
                seeds_T=seed_tensor([p.seed for p in of_node]),
            ),
            most_length=max(cache.lengths) + 3,
        )
        logits_TV, chosen = host_choice(model, cache, trees)
        verify = model.verify(cache, trees, rows=ROWS)
        ends = [walk(trees[0], chosen[: sizes[0]]), walk(trees[1], chosen[sizes[0] :])]
        cache.commit(verify, [end.path for end in ends])
        assert_near(outputs.logits_TV, logits_TV, "logits", tolerance)
        for i, (end, first) in enumerate(zip(ends, (0, sizes[0]), strict=True)):
            assert [node - first for node in outputs.path_BA[i].tolist() if node >= 0] == list(end.path)
            accepted += len(end.path) - 1
        roots = [end.next_token for end in ends]
        assert outputs.next_token_B.tolist() == roots
        assert carried.lengths_B.tolist() == list(cache.lengths)
        beside._lengths[:] = carried.lengths_B.tolist()
        for row in ROWS:
            assert_same_state(live_state(beside, row), live_state(cache, row), f"row {row}")
    return accepted


@pytest.mark.parametrize("lengths", [pytest.param((1, 2), marks=pytest.mark.slow), (13, 30)])
def test_rounds_in_torch_are_the_hosts(lengths: tuple[int, int]) -> None:
    model = random_model((0, 4, 8, 4), draft_head=DraftHeadKind.MTP)
    assert check_rounds(torch_ops(), model, lengths, 3, 1e-10) > 2


@pytest.mark.slow
def test_rounds_without_a_draft_head() -> None:
    model = random_model((4, 8), draft_head=DraftHeadKind.NONE)
    check_rounds(torch_ops(), model, (5, 9), 2, 1e-10)


def test_rounds_in_triton_are_the_hosts() -> None:
    """Index heads are many, so that scores do not tie; float32 scores choose as float64 ones would."""
    model = random_model((4, 8), dtype=torch.float32)
    check_rounds(triton_ops(), model, (13, 30), 2, 1e-4)
