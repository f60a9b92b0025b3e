"""What is recommended where the truth is planted."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compressed_spec.measure.record import SweepRecord
from compressed_spec.measure.reporting.recommend import Reason, advise
from compressed_spec.measure.reporting.selection import PLAIN, Mode

Sweep = Callable[..., list[SweepRecord]]
TREE, CHAIN, SMALL = "s3_k2_d6", "s5_k1_d6", "s3_k1_d4"


def sentence(records: list[SweepRecord]) -> str:
    (advice,) = advise(records)
    return advice.sentence


def test_a_tree_wins(sweep: Sweep) -> None:
    records = sweep({1: {"off": 50, CHAIN: 75, TREE: 90, SMALL: 80}})
    assert sentence(records).startswith("Use s3_k2_d6 at batch 1 (+")
    (verdict,) = advise(records)[0].verdicts
    assert (verdict.mode, verdict.reason) == (Mode(tree=TREE, drafter="auto"), Reason.FASTEST)
    assert verdict.gain is not None
    assert verdict.gain.low < 0.8 < verdict.gain.high


def test_a_chain_wins(sweep: Sweep) -> None:
    assert sentence(sweep({4: {"off": 50, CHAIN: 75, TREE: 65, SMALL: 70}})).startswith("Use s5_k1_d6 at batch 4 (+")


@pytest.mark.parametrize("noise", [0.001, 0.02])
def test_nothing_wins(sweep: Sweep, noise: float) -> None:
    records = sweep({2: {"off": 50, CHAIN: 45, TREE: 40}}, noise=noise)
    assert sentence(records) == "Speculation off at batch 2, where it is slower."
    assert advise(records)[0].verdicts[0].reason is Reason.SLOWER


def test_intervals_that_hold_zero_support_nothing(sweep: Sweep) -> None:
    records = sweep({2: {"off": 50, CHAIN: 50.3, TREE: 50.6}}, noise=0.3, num_repeats=1)
    (advice,) = advise(records)
    assert advice.sentence == "Speculation off at batch 2, where it is not shown to be faster."
    assert advice.single_repeat
    assert advice.verdicts[0].mode == PLAIN
    assert advice.verdicts[0].gain is not None
    assert advice.verdicts[0].gain.low <= 0 <= advice.verdicts[0].gain.high


def test_a_tree_that_is_no_better_than_a_chain_is_not_recommended(sweep: Sweep) -> None:
    (verdict,) = advise(sweep({1: {"off": 50, TREE: 80.05, CHAIN: 80, SMALL: 79.95, "auto": 80.02}}))[0].verdicts
    assert verdict.mode == Mode(tree=SMALL, drafter="auto")
    assert verdict.reason is Reason.AS_GOOD


def test_batch_sizes_fall_into_ranges(sweep: Sweep) -> None:
    win, lose = {"off": 50, TREE: 90, SMALL: 60}, {"off": 50, TREE: 45, SMALL: 40}
    chain = {"off": 50, TREE: 60, SMALL: 90}
    found = sentence(sweep({1: win, 4: win, 8: win, 16: chain, 32: lose, 64: lose}))
    assert found.startswith("Use s3_k2_d6 at batch <= 8 (+")
    assert "; use s3_k1_d4 at batch 16 (+" in found
    assert found.endswith("; speculation off from batch 32, where it is slower.")
    assert sentence(sweep({2: lose, 8: lose})) == "Speculation off at batch 2 to 8, where it is slower."


def test_one_mode_serves_as_many_batch_sizes_as_it_can(sweep: Sweep) -> None:
    """At batch 2 the chain and the tree do as well; the tree is needed at batch 1, another chain at batch 4."""
    speeds = {
        1: {"off": 50.0, TREE: 90.0, CHAIN: 70.0, SMALL: 60.0},
        2: {"off": 50.0, TREE: 80.05, CHAIN: 80.0, SMALL: 60.0},
        4: {"off": 50.0, TREE: 60.0, CHAIN: 60.0, SMALL: 90.0},
    }
    found = sentence(sweep(speeds))
    assert found.startswith("Use s3_k2_d6 at batch <= 2 (+6")
    assert "; use s3_k1_d4 from batch 4 (+" in found
    verdicts = advise(sweep(speeds))[0].verdicts
    assert [verdict.reason for verdict in verdicts] == [Reason.FASTEST, Reason.AS_GOOD, Reason.FASTEST]
    assert all(verdict.gain == verdict.gains[verdict.mode] for verdict in verdicts if verdict.mode is not None)


def test_datasets_are_judged_together(sweep: Sweep) -> None:
    """Pooled by hand: tokens of both over seconds of both."""
    fast, slow = {"off": 50.0, TREE: 100.0}, {"off": 50.0, TREE: 40.0}
    records = sweep({1: fast}, datasets=["a"], noise=1e-6) + sweep({1: slow}, datasets=["b"], noise=1e-6)
    (verdict,) = advise(records)[0].verdicts

    def speed(tree: str) -> float:
        requests = [one for r in records if r.tree == tree and r.results for one in r.results.requests]
        return sum(one.completion_tokens - 1 for one in requests) / sum(one.decode_seconds for one in requests)

    assert verdict.gain is not None
    assert verdict.gain.estimate == pytest.approx(speed(TREE) / speed("off") - 1)
    assert verdict.mode == PLAIN  # it wins on one, loses on the other


def test_what_breaks_requests_is_not_recommended(sweep: Sweep) -> None:
    records = sweep({1: {"off": 50, TREE: 200, SMALL: 80}}, failing=[TREE])
    assert sentence(records).startswith("Use s3_k1_d4 at batch 1")


def test_what_was_measured_in_part_is_not_compared(sweep: Sweep) -> None:
    records = sweep({1: {"off": 50, TREE: 200, SMALL: 80}}, datasets=["a", "b"])
    kept = [record for record in records if record.tree != TREE or record.dataset == "a"]
    assert sentence(kept).startswith("Use s3_k1_d4 at batch 1")


def test_without_plain_decoding_or_with_few_requests_there_is_no_advice(sweep: Sweep) -> None:
    words = "No advice at batch 1, where too little was measured."
    assert sentence(sweep({1: {TREE: 90, SMALL: 80}})) == words
    assert sentence(sweep({1: {"off": 50, TREE: 90}}, num_requests=5)) == words
    failed = [replace(one, error="It broke.", results=None) if one.tree == "off" else one for one in
              sweep({1: {"off": 50, TREE: 90}})]  # fmt: skip
    assert sentence(failed) == words


def test_nothing_that_both_finished_is_nothing_to_compare(sweep: Sweep) -> None:
    def only(record: SweepRecord, kept: int) -> SweepRecord:
        assert record.results is not None
        requests = [one if one.index == kept else replace(one, error="It broke.") for one in record.results.requests]
        return replace(record, results=replace(record.results, requests=tuple(requests)))

    records = [only(one, int(one.tree == "off")) for one in sweep({1: {"off": 50, TREE: 90}})]
    assert sentence(records) == "No advice at batch 1, where too little was measured."


def test_each_load_has_its_own_advice(sweep: Sweep) -> None:
    records = sweep({8: {"off": 50, TREE: 90}}) + sweep({8: {"off": 50, TREE: 40}}, arrival_rate=2.0)
    closed, opened = (advice.sentence for advice in advise(records))
    assert closed.startswith("At temperature 0: Use s3_k2_d6 at batch 8")
    assert opened == "At temperature 0, 2 requests/s: Speculation off at batch 8, where it is slower."


def test_drafters_compete(sweep: Sweep) -> None:
    other = [one for one in sweep({1: {"off": 50, TREE: 120}}, drafter="ngram") if one.tree != "off"]
    assert sentence(sweep({1: {"off": 50, TREE: 90}}) + other).startswith("Use s3_k2_d6 with ngram at batch 1")


def test_luck_is_seen_through(sweep: Sweep) -> None:
    """Many trees, none better than another or than plain decoding: the best of them is best by luck."""
    trees = {f"s{n}_k1_d{n + 1}": 50.0 for n in range(1, 16)} | {"off": 50.0}
    verdicts = [advise(sweep({1: trees}, noise=0.25, num_repeats=1, seed=seed))[0].verdicts[0] for seed in range(10)]
    assert sum(verdict.mode != PLAIN for verdict in verdicts) <= 1


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(speeds=st.lists(st.floats(20, 100), min_size=4, max_size=4), noise=st.floats(0, 0.4), seed=st.integers(0, 99))
def test_what_is_recommended_is_faster_here(sweep: Sweep, speeds: list[float], noise: float, seed: int) -> None:
    records = sweep({1: dict(zip(("off", TREE, CHAIN, SMALL), speeds, strict=True))}, noise=noise, seed=seed)
    (verdict,) = advise(records)[0].verdicts
    assert verdict.mode is not None

    def seconds(tree: str) -> float:
        return sum(one.decode_seconds for r in records if r.tree == tree and r.results for one in r.results.requests)

    if verdict.mode != PLAIN:
        assert seconds(verdict.mode.tree) < seconds("off")
        assert verdict.gain is not None
        assert verdict.gain.low > 0
