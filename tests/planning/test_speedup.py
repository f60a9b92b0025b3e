"""Tokens a round and speed-up: worked numbers, and a simulation of rounds."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressed_spec.measure.planning.speedup import Round, chain_round, expected_tokens
from compressed_spec.shaping.optimal import expected_length
from compressed_spec.topology import Topology


@pytest.mark.parametrize(
    ("acceptance", "draft_ms", "tokens", "cycle_ms", "per_token_ms", "speedup"),
    [(0.8, 1, 3.3616, 18, 5.355, 1.868), (0.9, 3, 4.0951, 26, 6.349, 1.575)],
)
def test_worked_numbers(
    acceptance: float, draft_ms: float, tokens: float, cycle_ms: float, per_token_ms: float, speedup: float
) -> None:
    """Four drafts, verification 12 ms, state 2 ms, plain decoding 10 ms a token: the better drafter is the slower."""
    one = chain_round(acceptance, 4, draft_per_token=draft_ms / 1e3, verify=12e-3, state=2e-3)
    assert one.tokens == pytest.approx(tokens, abs=5e-5)
    assert 1e3 * one.seconds == pytest.approx(cycle_ms, abs=1e-9)
    assert 1e3 * one.seconds_per_token == pytest.approx(per_token_ms, abs=5e-4)
    assert one.speedup(10e-3) == pytest.approx(speedup, abs=5e-4)


def test_measured_tokens_stand_in_for_the_formula() -> None:
    assert Round(tokens=2.5, draft=0.0, verify=0.02).speedup(0.01) == pytest.approx(1.25)


def test_expected_tokens_of_simulated_rounds() -> None:
    rng = random.Random(0)
    emitted = 0
    for _ in range(40_000):
        accepted = 0
        while accepted < 5 and rng.random() < 0.7:
            accepted += 1
        emitted += accepted + 1
    assert expected_tokens(0.7, 5) == pytest.approx(emitted / 40_000, abs=0.03)


@given(acceptance=st.floats(0, 1), num_drafts=st.integers(0, 20))
def test_expected_tokens_has_its_bounds_and_is_that_of_a_chain(acceptance: float, num_drafts: int) -> None:
    tokens = expected_tokens(acceptance, num_drafts)
    assert 1 <= tokens <= num_drafts + 1
    assert expected_tokens(acceptance, num_drafts + 1) >= tokens
    if acceptance < 1:
        assert tokens == pytest.approx((1 - acceptance ** (num_drafts + 1)) / (1 - acceptance))
    chain = Topology(parents=tuple(range(-1, num_drafts)))
    assert tokens == pytest.approx(expected_length(chain, [[acceptance]] * num_drafts))


@pytest.mark.parametrize(("acceptance", "num_drafts"), [(-0.1, 2), (1.1, 2), (0.5, -1)])
def test_no_such_chain(acceptance: float, num_drafts: int) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        expected_tokens(acceptance, num_drafts)
