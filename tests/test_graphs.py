"""Graphs of rounds: their keys, their filled-up batches, and that they see what they are given."""

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch

from compressed_spec.device_trees import DeviceTrees, RoundInputs
from compressed_spec.models.deepseek_v4 import graphs
from compressed_spec.models.deepseek_v4.device_forward import DeviceForward
from compressed_spec.models.deepseek_v4.device_round import DeviceRound
from compressed_spec.models.deepseek_v4.graphs import GraphedRounds, GraphKey, batch_bucket, length_bucket
from compressed_spec.models.deepseek_v4.layer_ops import torch_ops
from compressed_spec.testing.models import prefilled, random_model, random_text
from compressed_spec.testing.state import assert_near, assert_same_state, live_state

FORM = [-1, 0, 0, 1]


def inputs(rows: list[int], seed: int) -> RoundInputs:
    num_nodes = len(rows) * len(FORM)
    return RoundInputs(
        rows_B=torch.tensor(rows),
        tokens_T=torch.tensor(random_text(num_nodes, seed=seed)),
        temperature_T=torch.full((num_nodes,), 0.7, dtype=torch.float64),
        seeds_T=torch.arange(num_nodes),
    )


def test_rounds_are_the_plain_ones() -> None:
    model = random_model((4, 8))
    cache = prefilled(model, [random_text(n, seed=n) for n in (5, 9, 20, 7)], max_length=64)
    plain, graphed = (DeviceRound(DeviceForward(model, deepcopy(cache), torch_ops())) for _ in range(2))
    bodies: list[Callable[[], None]] = []

    def capture(body: Callable[[], None]) -> Callable[[], None]:
        """As a graph would: the body runs while it is recorded, and again at every replay."""
        body()
        bodies.append(body)
        return body

    rounds = GraphedRounds(graphed, capture)
    for seed, rows in enumerate([[2, 0, 1], [0], [1, 0, 2]]):
        given = inputs(rows, seed)
        expected = plain(DeviceTrees.of([FORM] * len(rows), plain.spec, plain.device), given, 30)
        actual = rounds(FORM, given, 30)
        assert_near(actual.logits_TV, expected.logits_TV, "logits")
        for name in ("path_BA", "count_B", "next_token_B"):
            assert torch.equal(getattr(actual, name), getattr(expected, name))
        assert torch.equal(graphed.lengths_B, plain.lengths_B)
    for row in range(3):
        lengths = plain.lengths_B.tolist()
        for carried in (plain, graphed):
            carried.cache._lengths[:] = lengths
        assert_same_state(live_state(graphed.cache, row), live_state(plain.cache, row), f"row {row}")
    assert rounds.keys == tuple(
        GraphKey(form=tuple(FORM), drafted=False, num_trees=n, most_length=1024) for n in (4, 1)
    )
    assert len(bodies) == 2


def test_other_lengths_and_forms_are_other_graphs() -> None:
    model = random_model((4,))
    cache = prefilled(model, [random_text(5)], max_length=64)
    rounds = GraphedRounds(DeviceRound(DeviceForward(model, cache, torch_ops())), graphs.eager)
    for form, length in (([-1], 10), ([-1], 1024), ([-1], 1025), ([-1, 0], 10)):
        given = RoundInputs(
            rows_B=torch.tensor([0]),
            tokens_T=torch.zeros(len(form), dtype=torch.int64),
            temperature_T=torch.zeros(len(form), dtype=torch.float64),
            seeds_T=torch.zeros(len(form), dtype=torch.int64),
        )
        rounds(form, given, length)
    assert [(len(key.form), key.most_length) for key in rounds.keys] == [(1, 1024), (1, 2048), (2, 1024)]


def test_buckets() -> None:
    assert [batch_bucket(n) for n in (1, 2, 3, 5, 33, 64)] == [1, 2, 4, 8, 64, 64]
    assert [length_bucket(n) for n in (0, 1024, 1025, 5000)] == [1024, 1024, 2048, 8192]
    with pytest.raises(ValueError, match="split the batch"):
        batch_bucket(65)
