"""Bootstrap intervals in cases whose answer is known, and what is compared with what."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from compressed_spec.measure.bootstrap import Interval, RatioSums, gain_interval
from compressed_spec.measure.compare import (
    Measure,
    against_off,
    best_of_each,
    by_group,
    equal_budget,
    tree_interval,
)
from compressed_spec.measure.record import SweepRecord

MakeRecord = Callable[..., SweepRecord]
LENGTH, SPEED = Measure.ACCEPTANCE_LENGTH, Measure.DECODE_THROUGHPUT


def sums(above: list[list[float]], below: list[list[float]] | None = None) -> RatioSums:
    values = np.array(above)
    return RatioSums(above_RN=values, below_RN=np.ones_like(values) if below is None else np.array(below))


def test_the_mean_of_many_has_the_interval_of_the_normal_law() -> None:
    values = np.random.default_rng(3).normal(10.0, 2.0, size=400)
    found = sums([values.tolist()]).interval()
    half = 1.959964 * values.std() / math.sqrt(len(values))
    assert found.estimate == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_the_mean_of_coins_has_the_binomial_interval() -> None:
    """20 coins, 8 of them heads: the resampled mean is Binomial(20, 0.4) / 20, whose percentiles are known."""
    found = sums([[1.0] * 8 + [0.0] * 12]).interval()
    law = [math.comb(20, k) * 0.4**k * 0.6 ** (20 - k) for k in range(21)]
    points = [next(k for k in range(21) if sum(law[: k + 1]) > tail) / 20 for tail in (0.025, 0.975)]
    assert [found.low, found.high] == pytest.approx(points, abs=0.051)  # one coin, for the draws are random themselves
    assert found.estimate == pytest.approx(0.4)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Ratio of sums, with different weights of requests: 95 % nominal."""
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(200):
        rounds = rng.integers(5, 40, size=60)
        tokens = rounds * 2.5 + rng.normal(0, 1, size=60) * np.sqrt(rounds)
        found = sums([tokens.tolist()], [rounds.tolist()]).interval()
        hits += found.low <= 2.5 <= found.high
    assert 0.88 <= hits / 200 <= 1.0


def test_repeats_are_drawn_too() -> None:
    """Every request alike, three repeats of different speed: resampled means are means of 3 draws from 1, 2, 3."""
    found = sums([[1.0] * 50, [2.0] * 50, [3.0] * 50]).interval()
    # The 27 draws: mean 1 once (3.7 %), 3 once, so both lie inside the central 95 %.
    assert [found.low, found.high] == pytest.approx([1.0, 3.0])
    assert found.estimate == pytest.approx(2.0)


def test_a_gain_is_paired() -> None:
    """Requests differ a lot, but the second side is always 10 % better: the gain is certain, the two means are not."""
    values = np.random.default_rng(1).uniform(1, 20, size=30)
    one, other = sums([values.tolist()]), sums([(1.1 * values).tolist()])
    assert one.interval().overlaps(other.interval())
    gain = gain_interval(one, other)
    assert [gain.estimate, gain.low, gain.high] == pytest.approx([0.1] * 3)


def test_overlap() -> None:
    one = Interval(estimate=1.5, low=1.0, high=2.0)
    assert one.overlaps(Interval(estimate=2.5, low=2.0, high=3.0))
    assert one.overlaps(Interval(estimate=1.5, low=1.4, high=1.6))
    assert not one.overlaps(Interval(estimate=2.5, low=2.01, high=3.0))
    assert not Interval(estimate=2.5, low=2.01, high=3.0).overlaps(one)


def requests(tokens: list[int], rounds: int = 10, seconds: float = 1.0) -> list[dict[str, object]]:
    return [
        {"whole_tokens": count, "whole_rounds": rounds, "completion_tokens": count + 1, "decode_seconds": seconds}
        for count in tokens
    ]


def test_chain_and_tree_at_equal_budget(make_record: MakeRecord) -> None:
    chain = make_record("s5_k1_d6", requests=requests([20, 22, 21, 23]))
    records = [
        make_record("off", requests=requests([10] * 4)),
        chain,
        make_record("s3_k2_d6", requests=requests([26, 29, 27, 30])),
        make_record("s2_k3_d6", requests=requests([21, 21, 22, 22])),
        make_record("s3_k2_d5", requests=requests([99] * 4)),  # another budget
        make_record("s4_k2_d6", error="RuntimeError: no memory"),
        make_record("auto", requests=requests([99] * 4)),
    ]
    tree, even = equal_budget(records, LENGTH)
    assert (tree.first, tree.second, tree.num_nodes) == ("s5_k1_d6", "s3_k2_d6", 6)
    assert tree.gain.estimate == pytest.approx(112 / 86 - 1)
    assert tree.first_interval.estimate == pytest.approx(86 / 40)
    assert (tree.num_requests, tree.num_repeats, tree.overlap, tree.warning) == (4, 1, False, None)
    assert (even.first, even.second) == ("s5_k1_d6", "s2_k3_d6")
    assert even.overlap
    assert even.warning is not None
    assert "overlap" in even.warning
    assert tree_interval([chain], LENGTH) == tree.first_interval
    speed = equal_budget(records, SPEED)[0]
    assert speed.warning is not None  # one repeat says nothing of the machine
    assert "one repeat" in speed.warning
    assert [one.second for one in against_off(records, LENGTH)] == [
        "s5_k1_d6",
        "s3_k2_d6",
        "s2_k3_d6",
        "s3_k2_d5",
        "auto",
    ]


def test_only_what_both_finished_counts(make_record: MakeRecord) -> None:
    refused = {"error": "too long", "completion_tokens": 0, "whole_tokens": 0, "whole_rounds": 0}
    chain = [make_record("s3_k1_d4", repeat=r, requests=[*requests([20, 30]), refused]) for r in range(3)]
    tree = [make_record("s2_k2_d4", repeat=r, requests=[refused, *requests([40, 50])]) for r in (0, 2)]
    (found,) = equal_budget([*chain, *tree], LENGTH)
    assert (found.num_requests, found.num_repeats) == (1, 2)
    assert found.gain.estimate == pytest.approx(40 / 30 - 1)
    assert equal_budget([chain[0], tree[1]], LENGTH) == []  # no repeat in common


def test_other_conditions_are_other_groups(make_record: MakeRecord) -> None:
    chain, tree = make_record("s3_k1_d4"), make_record("s2_k2_d4")
    assert len(equal_budget([chain, tree], LENGTH)) == 1
    for other in (
        replace(tree, batch_size=2),
        replace(tree, temperature=1.0),
        replace(tree, dataset="mbpp"),
        replace(tree, arrival_rate=1.0),
        replace(tree, drafter="ngram"),
        replace(tree, prompts_hash="sha256:1"),
        replace(tree, setup=replace(tree.setup, dtype="bfloat16")),
        replace(tree, environment=replace(tree.environment, device_name="another")),
    ):
        assert equal_budget([chain, other], LENGTH) == []
    for same in (
        replace(tree, environment=replace(tree.environment, argv=("again",))),
        replace(tree, setup=replace(tree.setup, model="./tiny")),
    ):
        assert len(equal_budget([chain, same], LENGTH)) == 1


def test_plain_decoding_is_compared_with_every_drafter(make_record: MakeRecord) -> None:
    records = [make_record("off"), make_record("s3_k2_d6"), make_record("s3_k2_d6", drafter="ngram")]
    groups = by_group(records)
    assert sorted((group.drafter, *trees) for group, trees in groups.items()) == [
        ("auto", "off", "s3_k2_d6"),
        ("ngram", "off", "s3_k2_d6"),
    ]
    assert [list(trees) for trees in by_group(records[:1]).values()] == [["off"]]


def test_texts_that_differ_are_counted(make_record: MakeRecord) -> None:
    off = [make_record("off", repeat=r, requests=[{"output_hash": h} for h in "abc"]) for r in (0, 1)]
    tree = [
        make_record("s3_k2_d6", repeat=r, requests=[{"output_hash": h} for h in s]) for r, s in ((0, "abd"), (1, "axd"))
    ]
    (found,) = against_off([*off, *tree], LENGTH)
    assert (found.same_outputs, found.num_requests) == (1, 3)


def test_the_best_of_many_is_not_judged_by_its_luck(make_record: MakeRecord) -> None:
    """A hundred trees as good as the one chain, apart from noise: the best of them must not look better."""
    rng = np.random.default_rng(0)

    def noisy(tree: str) -> SweepRecord:
        return make_record(tree, requests=requests([int(n) for n in rng.normal(2000, 300, size=40)], rounds=1000))

    trees = [noisy(f"s{steps}_k{top_k}_d9") for steps in range(3, 23) for top_k in range(3, 8)]
    (found,) = best_of_each([noisy("s8_k1_d9"), *trees], LENGTH)
    assert abs(found.gain.estimate) < 0.05
    assert found.gain.low < 0 < found.gain.high
    best = max(sum(one.whole_tokens for one in tree.results.requests) for tree in trees if tree.results)
    assert best / (40 * 2000) > 1.05  # as the lucky one would have looked


def test_the_best_of_each_at_any_budget(make_record: MakeRecord) -> None:
    records = [
        make_record("s3_k1_d4", requests=requests([20] * 6)),
        make_record("s7_k1_d8", requests=requests([30] * 6)),
        make_record("s3_k2_d4", requests=requests([22] * 6)),
        make_record("s3_k2_d6", requests=requests([27] * 6)),
    ]
    (found,) = best_of_each(records, LENGTH)
    assert (found.first, found.second, found.num_nodes) == ("s7_k1_d8", "s3_k2_d6", None)
    assert found.gain.estimate == pytest.approx(-0.1)  # though at four nodes the tree was ahead
    assert equal_budget(records, LENGTH)[0].gain.estimate == pytest.approx(0.1)
    assert best_of_each(records[:2], LENGTH) == []
    assert best_of_each([make_record("s3_k1_d4", requests=[{}]), make_record("s3_k2_d6", requests=[{}])], LENGTH) == []
