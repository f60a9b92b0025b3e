"""The cost model: fitted to seconds, and the profile that takes them, on a clock of the test's own."""

import math
import random
from collections.abc import Sequence

import pytest
import torch

from compressed_spec import TokenTree
from compressed_spec.cache import Cache, Verification
from compressed_spec.drafting import DraftRequest, NgramDrafter
from compressed_spec.shaping import profile_costs
from compressed_spec.shaping.costs import DraftSample, VerifySample, fit_costs
from compressed_spec.testing import MarkovModel, cycle, random_model
from compressed_spec.tree import TreeShape

SHAPE = TreeShape(num_steps=3, top_k=2, num_nodes=8)


def seconds_of(num_rows: int, num_nodes: int, context: int) -> float:
    return 5e-3 + 1e-4 * num_rows + 2e-4 * num_nodes + 1e-7 * num_nodes * context


def test_fit_recovers_the_terms() -> None:
    verify = [
        VerifySample(num_rows=b, num_nodes=b * n, context=c, seconds=seconds_of(b, b * n, c))
        for b in (1, 3, 8)
        for n in (1, 4, 9, 16)
        for c in (8, 512)
    ]
    draft = [
        DraftSample(num_rows=b, num_steps=s, top_k=k, seconds=1e-3 + 2e-3 * s + 1e-5 * b * (1 + (s - 1) * k))
        for b in (1, 8)
        for s, k in ((1, 1), (4, 1), (4, 3))
    ]
    costs = fit_costs(verify, draft, lambda nodes: 0.0)
    for b, n, c in ((2, 12, 100), (8, 8, 2000), (1, 64, 8)):
        assert costs.verify_seconds(b, n, c) == pytest.approx(seconds_of(b, n, c), rel=1e-3)
    assert costs.draft_seconds(4, 6, 2) == pytest.approx(1e-3 + 12e-3 + 4e-5 * 11, rel=1e-3)


def test_fit_sees_the_experts() -> None:
    """Reading expert weights saturates with the nodes: a straight line in nodes would miss it by far."""

    def experts(nodes: float) -> float:
        return 32 * (1 - math.pow(1 - 4 / 32, nodes))

    counts = (1, 2, 4, 8, 16, 32)
    verify = [VerifySample(num_rows=1, num_nodes=n, context=8, seconds=1e-3 + 1e-3 * experts(n)) for n in counts]
    costs = fit_costs(verify, [], experts)
    for n in (3, 12, 24, 64):
        assert costs.verify_seconds(1, n, 8) == pytest.approx(1e-3 + 1e-3 * experts(n), rel=0.01)
    straight = fit_costs(verify, [], lambda nodes: 0.0)
    assert abs(straight.verify_seconds(1, 64, 8) / (1e-3 + 1e-3 * experts(64)) - 1) > 0.2
    assert costs.draft_seconds(1, 3, 2) == 0.0


def test_fit_never_rewards_more_nodes() -> None:
    rng = random.Random(0)
    verify = [VerifySample(num_rows=1, num_nodes=n, context=8, seconds=rng.uniform(1e-3, 2e-3)) for n in range(1, 17)]
    costs = fit_costs(verify, [], lambda nodes: 0.0)
    times = [costs.verify_seconds(1, n, 8) for n in range(1, 33)]
    assert times == sorted(times)
    assert min(times) > 0


def test_fit_refuses_what_took_no_time() -> None:
    with pytest.raises(ValueError, match="at least one verify sample"):
        fit_costs([], [], lambda nodes: 0.0)
    with pytest.raises(ValueError, match="some time"):
        fit_costs([VerifySample(num_rows=1, num_nodes=1, context=1, seconds=0.0)], [], lambda nodes: 0.0)


def test_experts_of_a_model() -> None:
    """Four experts, two a token: the mean over all ways of routing two tokens is 3."""
    model = random_model((0,))
    assert model.num_experts(0) == 0.0
    assert model.num_experts(1) == pytest.approx(2.0)
    assert model.num_experts(2) == pytest.approx(3.0)
    assert MarkovModel(cycle(4), cycle(4)).num_experts(5) == 0.0


class TimedModel(MarkovModel):
    """Its verify takes a known time on the test's clock."""

    now = 0.0

    def verify(self, cache: Cache, trees: Sequence[TokenTree], *, rows: Sequence[int] | None = None) -> Verification:
        self.now += seconds_of(len(trees), sum(map(len, trees)), cache.lengths[0])
        return super().verify(cache, trees, rows=rows)


class TimedDrafter(NgramDrafter):
    def __init__(self, model: TimedModel) -> None:
        super().__init__()
        self.model, self.started, self.released = model, set[int](), set[int]()

    def start(self, row: int, token_ids: Sequence[int]) -> None:
        self.started.add(row)
        super().start(row, token_ids)

    def release(self, row: int) -> None:
        self.released.add(row)

    def propose(self, request: DraftRequest) -> list[TokenTree]:
        self.model.now += 1e-3 * request.shape.num_steps
        return super().propose(request)


def test_profile_measures_what_the_clock_says() -> None:
    model = TimedModel(cycle(12), cycle(12))
    drafter = TimedDrafter(model)
    costs = profile_costs(model, drafter, batch_size=4, max_length=300, shape=SHAPE, clock=lambda: model.now)
    for b, n, c in ((1, 1, 8), (2, 10, 100), (4, 32, 300)):
        assert costs.verify_seconds(b, n, c) == pytest.approx(seconds_of(b, n, c), rel=0.02)
    assert costs.draft_seconds(2, 2, 2) == pytest.approx(2e-3, rel=0.02)
    assert drafter.started == drafter.released == {0, 1, 2, 3}
    without = profile_costs(model, None, batch_size=1, max_length=20, shape=SHAPE, clock=lambda: model.now)
    assert without.draft_seconds(1, 3, 2) == 0.0


class Faulty(NgramDrafter):
    def propose(self, request: DraftRequest) -> list[TokenTree]:
        raise RuntimeError("a drafter's own fault")


def test_profile_survives_a_faulty_drafter_and_real_models() -> None:
    model = random_model((0, 4), dtype=torch.float32)
    costs = profile_costs(model, Faulty(), batch_size=2, max_length=20, shape=SHAPE)
    assert costs.draft_seconds(2, 3, 2) == 0.0
    assert costs.verify_seconds(2, 16, 20) > 0
