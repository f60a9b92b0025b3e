"""Scores of draft nodes, what is learnt of them while decoding, and the calibration that measures them beforehand.

B = batch rows, F = nodes of a level, V = vocabulary
"""

import json
import math
import random
from pathlib import Path

import pytest
import torch

from compressed_spec import TokenTree, generate
from compressed_spec.drafting import DraftPlan, ScoredTree
from compressed_spec.drafting.base import usable_tree
from compressed_spec.drafting.scoring import Scoring
from compressed_spec.measure.calibrate import calibrate
from compressed_spec.shaping import Calibration, FixedShaper, RoundOutcome, read_calibration
from compressed_spec.shaping.tracking import AcceptanceTracker
from compressed_spec.testing import MarkovModel, RandomDrafter, cycle, mixed_table
from compressed_spec.tree import TreeShape


def law(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.log_softmax(torch.randn((2, 3, 7), generator=generator, dtype=torch.float64), dim=-1)


def test_edges_are_softmax_of_law_and_noise_over_temperature() -> None:
    log_q_BFV, noise_BV = law(), torch.randn((2, 7), dtype=torch.float64)
    assert Scoring().edges(log_q_BFV, None, (0.0, 1.0)) is log_q_BFV
    scoring = Scoring(greedy_temperature=0.6, sampled_temperature=0.5)
    noise_BV[0] = 0.0  # as for a greedy row
    edges_BFV = scoring.edges(log_q_BFV, noise_BV, (0.0, 1.0))
    for b, scale in ((0, 0.6), (1, 0.5)):
        for f in range(3):
            weights = [math.exp((log_q_BFV[b, f, v].item() + noise_BV[b, v].item()) / scale) for v in range(7)]
            for v in range(7):
                assert math.exp(edges_BFV[b, f, v].item()) == pytest.approx(weights[v] / sum(weights))


def test_corrections_by_depth_and_rank_keep_ranks_in_order() -> None:
    scoring = Scoring(log_bias=((0.0, -1.0), (0.5,)))
    assert [scoring.bias(depth, rank) for depth, rank in ((1, 0), (1, 1), (1, 5), (2, 0), (2, 3), (9, 1))] == [
        0.0,
        -1.0,
        -1.0,
        0.5,
        0.5,
        0.5,
    ]
    log_q_BFV = law()
    plain = Scoring().best(log_q_BFV, None, (0.0, 0.0), depth=1, count=3)
    first = scoring.best(log_q_BFV, None, (0.0, 0.0), depth=1, count=3)
    assert torch.equal(first.tokens_BFK, plain.tokens_BFK)
    assert torch.allclose(first.scores_BFK, plain.scores_BFK + torch.tensor([0.0, -1.0, -1.0]))
    sure = Scoring(log_bias=((5.0, 9.0),)).best(log_q_BFV, None, (0.0, 0.0), depth=1, count=2)
    assert torch.equal(sure.scores_BFK, torch.zeros_like(sure.scores_BFK))
    lifted = Scoring(log_bias=((-3.0, 3.0),)).best(log_q_BFV, None, (0.0, 0.0), depth=1, count=2)
    assert bool((lifted.scores_BFK[..., 1] <= lifted.scores_BFK[..., 0]).all())


def test_scored_trees_stay_scored_where_nodes_are_dropped() -> None:
    tree = ScoredTree(tokens=[3, 99, 5, 6], parents=[-1, 0, 0, 2], survival=[1.0, 0.9, 0.5, 0.25])
    kept = usable_tree(tree, 3, vocab_size=10, max_nodes=8, max_depth=9)
    assert isinstance(kept, ScoredTree)
    assert (kept.tokens, kept.parents, kept.survival) == ((3, 5, 6), (-1, 0, 1), (1.0, 0.5, 0.25))
    with pytest.raises(ValueError, match="one number a node"):
        ScoredTree(tokens=[3, 4], parents=[-1, 0], survival=[1.0])


def test_tracker_learns_rates_by_depth_and_rank() -> None:
    """Children drawn with known chances, rank 0 with 0.5 and rank 1 with 0.3 at depth 1, 0.8 and 0.1 at depth 2."""
    rng, tracker = random.Random(0), AcceptanceTracker()
    rates = [(0.5, 0.3), (0.8, 0.1)]
    tree = TokenTree(tokens=range(7), parents=[-1, 0, 0, 1, 1, 2, 2])
    for _ in range(4000):
        path = [0]
        for pair in rates:
            children, u = tree.children(path[-1]), rng.random()
            if u >= sum(pair):
                break
            path.append(children[u >= pair[0]])
        tracker.observe(tree, path)
    for depth, pair in enumerate(rates, start=1):
        for rank, rate in enumerate(pair):
            assert tracker.acceptance(depth, rank) == pytest.approx(rate, abs=0.06)
    assert tracker.acceptance(3, 0) == pytest.approx(tracker.acceptance(2, 0))  # never tried: as one level up


def test_tracker_rates_of_siblings_never_exceed_one() -> None:
    tracker = AcceptanceTracker()
    for _ in range(50):
        tracker.observe(TokenTree(tokens=[0, 1], parents=[-1, 0]), [0, 1])
    assert tracker.acceptance(1, 0) > 0.9
    assert sum(tracker.acceptance(1, rank) for rank in range(8)) <= 1
    assert AcceptanceTracker().acceptance(1, 0) > AcceptanceTracker().acceptance(1, 1) > 0


def test_recalibration_settles_at_what_is_accepted() -> None:
    """A drafter that says 0.9 of what happens 4 times in 10, and 0.1 of what happens 5 times in 10."""
    rng, tracker, scoring = random.Random(1), AcceptanceTracker(), Scoring(greedy_temperature=0.7)
    for _ in range(40):
        for _ in range(100):
            said = [math.exp(scoring.corrected(math.log(p), depth=1, rank=r)) for r, p in enumerate((0.9, 0.1))]
            tree = ScoredTree(tokens=[0, 1, 2], parents=[-1, 0, 0], survival=[1.0, *said])
            u = rng.random()
            tracker.observe(tree, [0, 1] if u < 0.4 else [0, 2] if u < 0.9 else [0])
        scoring = tracker.recalibrated(scoring)
    assert scoring.greedy_temperature == 0.7
    assert math.exp(scoring.corrected(math.log(0.9), depth=1, rank=0)) == pytest.approx(0.4, abs=0.06)
    assert math.exp(scoring.corrected(math.log(0.1), depth=1, rank=1)) == pytest.approx(0.5, abs=0.06)
    assert tracker.recalibrated(scoring) == scoring  # nothing seen since


def test_calibration_measures_a_known_acceptance() -> None:
    """The target walks a cycle of 12; the head is right first in 8 rows, with its second child in 4."""
    right = cycle(12)
    model = MarkovModel(right, mixed_table(right, [0, 3, 6, 9]))
    shape = TreeShape(num_steps=1, top_k=2, num_nodes=3)
    measured = calibrate(model, [[0], [5]], shape=shape, max_new_tokens=97)
    (row,) = measured.acceptance
    assert row == pytest.approx((8 / 12, 4 / 12), abs=0.06)
    assert sum(row) == 1.0
    assert measured.num_tried[0][0] == measured.num_tried[0][1]


def test_calibration_sharpens_as_far_as_the_drafter_is_right() -> None:
    """The score of a head that is always right cannot be too sharp; that of one with other tastes can."""
    target, other = 1.5 * cycle(24, sure=1.0, seed=3), 1.5 * cycle(24, sure=1.0, seed=4)
    prompts, shape = [[i] for i in range(24)], TreeShape(num_steps=2, top_k=3, num_nodes=8)
    right = calibrate(MarkovModel(target, target), prompts, shape=shape, max_new_tokens=40)
    assert right.acceptance[0][0] == 1.0
    assert right.score_temperature == right.scoring.greedy_temperature == 0.3
    wrong = calibrate(MarkovModel(target, other), prompts, shape=shape, max_new_tokens=40, temperature=1.0)
    assert wrong.score_temperature is not None
    assert wrong.score_temperature > 0.3
    assert wrong.scoring.sampled_temperature == wrong.score_temperature
    assert wrong.scoring.greedy_temperature == Calibration(acceptance=((1.0,),)).scoring.greedy_temperature


class Watcher(FixedShaper):
    """Adds up what trees say of their children of the root, and how often these are accepted."""

    def __init__(self, plan: DraftPlan) -> None:
        super().__init__(plan)
        self.said, self.accepted = [0.0, 0.0], [0, 0]

    def observe(self, outcome: RoundOutcome) -> None:
        for tree, path in zip(outcome.trees, outcome.paths, strict=True):
            assert isinstance(tree, ScoredTree)
            for rank in range(len(tree) - 1):
                self.said[rank] += tree.survival[1 + rank]
                self.accepted[rank] += path[1:] == (1 + rank,)


def test_calibrated_scores_match_acceptance_on_average() -> None:
    """With its fitted temperature and corrections, what a head says of a rank is that rank's acceptance."""
    model = MarkovModel(cycle(24, sure=2.0, seed=3), cycle(24, sure=2.0, seed=5))
    shape, prompts = TreeShape(num_steps=1, top_k=2, num_nodes=3), [[i] for i in range(24)]
    fitted = calibrate(model, prompts, shape=shape, max_new_tokens=100, temperature=1.0)
    errors = []
    for scoring in (fitted.scoring, Scoring()):
        watcher = Watcher(DraftPlan(shape=shape, scoring=scoring))
        generate(model, prompts, tree=watcher, max_new_tokens=100, temperature=1.0, seed=9)
        errors.append(max(abs(said / hits - 1) for said, hits in zip(watcher.said, watcher.accepted, strict=True)))
    assert errors[0] < 0.1 < errors[1]


def test_calibration_of_drafters_without_a_law() -> None:
    model = MarkovModel(cycle(12), cycle(12))
    measured = calibrate(model, [[0]], drafter="ngram", shape=TreeShape(num_steps=3, top_k=1, num_nodes=4))
    assert measured.score_temperature is None
    assert measured.log_bias == ()
    assert measured.acceptance[0][0] > 0.9
    assert measured.drafter == "ngram"
    by_object = calibrate(model, [[0]], drafter=RandomDrafter(12), shape=TreeShape(num_steps=3, top_k=1, num_nodes=4))
    assert by_object.drafter == "RandomDrafter"


def test_calibration_without_drafts() -> None:
    with pytest.raises(ValueError, match="No draft was verified"):
        calibrate(MarkovModel(cycle(12), cycle(12)), [[0]], max_new_tokens=2)
    with pytest.raises(ValueError, match="at least one prompt"):
        calibrate(MarkovModel(cycle(12), cycle(12)), [])


def test_calibration_files(tmp_path: Path) -> None:
    path = str(tmp_path / "cal.json")
    made = Calibration(
        acceptance=((0.8, 0.1), (0.5, 0.2)),
        num_tried=((9, 9), (5, 5)),
        temperature=1.0,
        score_temperature=0.45,
        log_bias=((0.1, -0.2),),
        drafter="mtp",
    )
    made.save(path)
    assert read_calibration(path) == made
    assert made.scoring.sampled_temperature == 0.45
    assert made.scoring.log_bias == ((0.1, -0.2),)
    (tmp_path / "short.json").write_text('{"acceptance": [[0.5]]}')
    assert read_calibration(str(tmp_path / "short.json")).scoring == Scoring(
        greedy_temperature=0.6, sampled_temperature=0.5
    )


@pytest.mark.parametrize(
    "content",
    [
        [],
        {},
        {"acceptance": []},
        {"acceptance": [[]]},
        {"acceptance": [[2.0]]},
        {"acceptance": [0.5]},
        {"acceptance": [["x"]]},
        {"acceptance": [[0.5]], "score_temperature": 0},
        {"acceptance": [[0.5]], "temperature": None},
    ],
)
def test_calibration_files_that_hold_none(tmp_path: Path, content: object) -> None:
    path = tmp_path / "cal.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"calibration file .*cal\.json"):
        read_calibration(str(path))
