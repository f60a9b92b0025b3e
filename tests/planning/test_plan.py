"""What is recommended, against brute force, and the machine that is measured."""

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from compressed_spec.measure.planning.check import BATCH_SIZES, CONTEXTS, CheckedStep, check_steps, median_error
from compressed_spec.measure.planning.cpu import measure_cpu, thin_model
from compressed_spec.measure.planning.devices import DEVICES, Device, Overhead, read_device, write_device
from compressed_spec.measure.planning.plan import PointPlan, make_plan
from compressed_spec.measure.planning.roofline import PlannedModel, Roofline
from compressed_spec.measure.planning.storage import FLOAT32_STORAGE, Rate
from compressed_spec.models.deepseek_v4.names import DraftHeadKind
from compressed_spec.shaping.optimal import expected_length
from compressed_spec.testing import random_model
from compressed_spec.topology import Topology

TABLE = [[0.7, 0.2, 0.05], [0.6, 0.2, 0.05], [0.5, 0.2, 0.05]]


def only_point(
    roofline: Roofline, acceptance: list[list[float]], *, batch_size: int = 1, context: int = 100, most: int = 6
) -> PointPlan:
    plan = make_plan(
        roofline, acceptance, batch_sizes=[batch_size], contexts=[context], budgets=list(range(2, most + 1))
    )
    return plan.points[0]


def priced(
    planned: Callable[..., PlannedModel], device: Callable[..., Device], *, node: float, step: float
) -> Roofline:
    """A round costs 1 s, `node` s a node and `step` s a draft step; everything else is nearly free."""
    overhead = Overhead(num_layers=43, verify=(1.0, 0.0, node, 0.0, 0.0), draft=(0.0, step, 0.0))
    return Roofline(planned("v4_flash"), device(bandwidth=1e30, flops={Rate.FP32: 1e30}, overhead=overhead))


def every_topology(num_nodes: int) -> set[tuple[int, ...]]:
    found: set[tuple[int, ...]] = {(-1,)}
    for _ in range(num_nodes - 1):
        found = {Topology.ordered([*parents, node]).parents for parents in found for node in range(len(parents))}
    return found


@pytest.mark.parametrize(("node", "step"), [(0.0, 0.0), (0.02, 0.1), (0.1, 0.3), (0.05, 0.0), (0.0, 0.2), (0.6, 0.6)])
def test_the_best_is_that_of_every_tree(
    planned: Callable[..., PlannedModel], device: Callable[..., Device], node: float, step: float
) -> None:
    def fits(topology: Topology) -> bool:
        return max(topology.depths) <= 3 and max(topology.ranks) <= 2

    def speed(topology: Topology) -> float:
        seconds = 1 + node * len(topology) + step * max(topology.depths)
        return expected_length(topology, TABLE) / seconds

    trees = [Topology(parents=parents) for count in range(2, 7) for parents in every_topology(count)]
    best = max(map(speed, filter(fits, trees)))
    point = only_point(priced(planned, device, node=node, step=step), TABLE)
    assert point.plain_seconds == pytest.approx(1 + node)
    if best * point.plain_seconds <= 1:
        assert point.best is None
        assert point.best_parts == {}
        return
    assert point.best is not None
    assert point.best.tokens_per_second == pytest.approx(best)
    assert point.best.speedup == pytest.approx(best * point.plain_seconds)
    assert math.fsum(point.best_parts.values()) == pytest.approx(point.best.seconds)


def test_each_budget_has_its_tree_and_chain(
    planned: Callable[..., PlannedModel], device: Callable[..., Device]
) -> None:
    point = only_point(priced(planned, device, node=0.01, step=0.01), TABLE)
    assert [one.num_nodes for one in point.budgets] == [one.tree.num_nodes for one in point.budgets] == [2, 3, 4, 5, 6]
    assert [one.chain and one.chain.name for one in point.budgets] == ["s1_k1_d2", "s2_k1_d3", "s3_k1_d4", None, None]
    for one in point.budgets:
        assert one.tree.tokens == pytest.approx(expected_length(Topology(parents=one.tree.parents), TABLE))
        assert one.chain is None or one.tree.tokens_per_second >= one.chain.tokens_per_second
    assert all(small.tree.tokens < large.tree.tokens for small, large in pairwise(point.budgets))


def test_experts_make_nodes_dear_in_small_batches_alone(planned: Callable[..., PlannedModel]) -> None:
    """More rows touch all experts anyway, so speculation's gain falls, rises, and falls again where products count."""
    roofline = Roofline(planned("v4_flash", 8), read_device("h200"))
    gains = {
        rows: only_point(roofline, [[0.8]] * 5, batch_size=rows, context=4096).budgets[2].tree.speedup
        for rows in (1, 8, 16, 4096)
    }
    assert gains[1] > gains[8]
    assert gains[4096] < gains[16]


def test_free_drafts_cost_nothing(planned: Callable[..., PlannedModel], device: Callable[..., Device]) -> None:
    plan = make_plan(
        priced(planned, device, node=0.0, step=9.0),
        TABLE,
        batch_sizes=[1],
        contexts=[10],
        budgets=[4],
        free_drafts=True,
    )
    best = plan.points[0].best
    assert best is not None
    assert best.draft_seconds == 0
    assert best.seconds == pytest.approx(1.0)


def test_nothing_is_recommended_where_there_is_no_room(planned: Callable[..., PlannedModel]) -> None:
    roofline = Roofline(planned("v4_flash"), read_device("h200"))
    point = only_point(roofline, TABLE)
    assert not point.fits
    assert point.best is None
    assert point.memory_bytes > 139 * 2**30
    assert only_point(Roofline(planned("v4_flash", 2), read_device("h200")), TABLE).fits


def test_a_context_beyond_the_model(planned: Callable[..., PlannedModel], device: Callable[..., Device]) -> None:
    with pytest.raises(ValueError, match="1048577 tokens is not within"):
        only_point(Roofline(planned("v4_flash"), device()), TABLE, context=2**20 + 1)


def test_devices(tmp_path: Path) -> None:
    h200 = read_device("h200")
    assert h200.bandwidth == pytest.approx(0.8 * 4.8e12)
    # No FP4 units: FP4 weights are multiplied as FP8.
    assert h200.seconds(0.0, 1.0, Rate.FP4) == h200.seconds(0.0, 1.0, Rate.FP8) == pytest.approx(1 / (0.6 * 1979e12))
    assert read_device("b200").seconds(0.0, 1.0, Rate.FP4) < read_device("b200").seconds(0.0, 1.0, Rate.FP8)
    raw = json.loads((DEVICES / "h200.json").read_text())
    del raw["attainable"]
    (tmp_path / "mine.json").write_text(json.dumps(raw))
    mine = read_device(str(tmp_path / "mine.json"))
    assert (mine.name, mine.bandwidth) == ("mine", 4.8e12)
    for damage in (
        {"bandwidth": 0},
        {"bandwidth": None},
        {"flops": {"fp8": 1e12}},
        {"flops": {"int4": 1}},
        {"flops": 3},
    ):
        (tmp_path / "mine.json").write_text(json.dumps(raw | damage))
        with pytest.raises(ValueError, match=r"mine\.json needs memory_bytes"):
            read_device(str(tmp_path / "mine.json"))
    with pytest.raises(ValueError, match="cpu, b200, h100, h200, or a JSON file"):
        read_device("h2000")


def test_thin_models_keep_what_is_listed(planned: Callable[..., PlannedModel]) -> None:
    model = random_model((0, 4, 8, 4))
    thin = thin_model(model.config, DraftHeadKind.MTP, 1)
    assert thin.config.layers == model.config.layers
    for key in ("sliding_window", "index_topk", "n_routed_experts", "num_experts_per_tok", "num_attention_heads"):
        assert getattr(thin.config, key) == getattr(model.config, key)
    assert thin.own_drafter == "mtp"
    assert sum(p.numel() for p in thin.parameters()) < sum(p.numel() for p in model.parameters())


def test_a_measured_machine_predicts_every_step_of_the_check(tmp_path: Path) -> None:
    """That its predictions are near is shown by `plan --check` on a quiet machine, not here."""
    model = random_model((0, 4), max_position_embeddings=1024)
    planned = PlannedModel(
        config=model.config, storage=FLOAT32_STORAGE, draft_head=DraftHeadKind.MTP, num_draft_layers=1, kv_bytes=4
    )
    cpu = measure_cpu(planned, 2)
    assert min(cpu.bandwidth, cpu.gather_bandwidth, cpu.pass_bandwidth, cpu.memory_bytes, *cpu.flops.values()) > 0
    write_device(cpu, tmp_path / "cpu.json")
    kept = read_device(str(tmp_path / "cpu.json"))
    again, now = (Roofline(planned, one).verify(3, 9, 100) for one in (kept, cpu))
    assert again == pytest.approx(now)
    steps = check_steps(model, lambda batch_size: Roofline(planned, cpu), passes=1)
    assert {(step.num_rows, step.context) for step in steps} == {(b, c) for b in BATCH_SIZES for c in CONTEXTS}
    assert {step.stage for step in steps} == {"verify", "draft"}
    assert all(step.measured > 0 and step.predicted > 0 for step in steps)


def test_median_error() -> None:
    def step(predicted: float) -> CheckedStep:
        return CheckedStep(stage="verify", num_rows=1, num_nodes=1, context=1, predicted=predicted, measured=2.0)

    assert median_error([step(1.0), step(2.2), step(2.0)]) == pytest.approx(0.1)
