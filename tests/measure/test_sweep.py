"""Points and their order, and a sweep that is killed wherever it writes."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from compressed_spec.measure import results
from compressed_spec.measure.datasets import Dataset, Prompt, Task
from compressed_spec.measure.point import Point, Workload
from compressed_spec.measure.record import SweepRecord
from compressed_spec.measure.results import open_results, read_results
from compressed_spec.measure.sweep import Grid, Outcome, run_sweep

MakeRecord = Callable[..., SweepRecord]
GRID = Grid(
    trees=("off", "s3_k1_d4", "s3_k2_d6"),
    drafters=("auto", "ngram"),
    batch_sizes=(1, 4),
    temperatures=(0.0,),
    datasets=("gsm8k", "mbpp"),
    arrival_rates=(None,),
    repeats=3,
)


class Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.fixture
def workloads(make_record: MakeRecord) -> Mapping[str, Workload]:
    def workload(name: str, tokens: tuple[int, ...]) -> Workload:
        dataset = Dataset(name=name, task=Task.CHAT, prompts=(Prompt(id="0", text=name),))
        return Workload(dataset=dataset, prompts_ids=(tokens,), setup=make_record().setup)

    return {"gsm8k": workload("gsm8k", (1, 2)), "mbpp": workload("mbpp", (3,))}


@pytest.fixture
def record_of(make_record: MakeRecord) -> Callable[[Point, Workload], SweepRecord]:
    """A record that depends on the point alone; points of three nodes more fail."""

    def measure(point: Point, workload: Workload) -> SweepRecord:
        error = "RuntimeError: no memory" if point.tree == "s3_k1_d4" and point.batch_size == 4 else None
        return make_record(**asdict(point), point_id=workload.point_id(point), error=error)

    return measure


def test_every_combination_once_a_repeat() -> None:
    points = GRID.points()
    assert len(points) == len(set(points)) == 3 * 2 * 2 * (2 * 2 + 1)  # without speculation there is one drafter
    assert {point.drafter for point in points if point.tree == "off"} == {"none"}
    third = len(points) // 3
    rounds = [points[i : i + third] for i in range(0, len(points), third)]
    assert [{point.repeat for point in one} for one in rounds] == [{0}, {1}, {2}]
    same = [[replace(point, repeat=0) for point in one] for one in rounds]
    for one in same[1:]:  # the same circle, begun elsewhere
        start = one.index(same[0][0])
        assert one[start:] + one[:start] == same[0]
    assert len({one[0] for one in same}) == 3


def test_ids_tell_points_apart_and_nothing_else(workloads: Mapping[str, Workload], tmp_path: Path) -> None:
    points = GRID.points()
    ids = [workloads[point.dataset].point_id(point) for point in points]
    assert len(set(ids)) == len(points)
    workload, point = workloads["gsm8k"], points[0]
    same = replace(workload, setup=replace(workload.setup, model="./elsewhere"))
    assert same.point_id(point) == workload.point_id(point)
    for other in (
        replace(workload, setup=replace(workload.setup, seed=1)),
        replace(workload, setup=replace(workload.setup, checkpoint_hash="sha256:1")),
        replace(workload, prompts_ids=((1, 3),)),
    ):
        assert other.point_id(point) != workload.point_id(point)
    file = tmp_path / "tree.json"
    file.write_text("1")
    static = replace(point, tree=f"static:{file}")
    before = workload.point_id(static)
    assert before == workload.point_id(static)
    file.write_text("2")
    assert workload.point_id(static) != before


class DyingSystem:
    """`os` that kills at call number `last` to write, sync or rename; a write gets through in part."""

    def __init__(self, last: int) -> None:
        self.left, self.died, self._part = last, False, 1 + last % 7

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in ("write", "fsync", "replace"):
            return real

        def call(*arguments: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                if name == "write":
                    os.write(arguments[0], arguments[1][: len(arguments[1]) * self._part // 8])
                self.died = True
                raise Killed
            return real(*arguments)

        return call


def sweep(path: Path, workloads: Mapping[str, Workload], measure: Callable[[Point, Workload], SweepRecord]) -> Outcome:
    with open_results(path) as file:
        return run_sweep(GRID.points(), workloads, measure, file)


@pytest.mark.parametrize("times", [1, 3])
def test_killed_at_any_write_and_resumed_equals_an_undisturbed_run(
    workloads: Mapping[str, Workload],
    record_of: Callable[[Point, Workload], SweepRecord],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    times: int,
) -> None:
    undisturbed, disturbed = tmp_path / "undisturbed.jsonl", tmp_path / "disturbed.jsonl"
    grid = replace(GRID, drafters=("auto",), datasets=("gsm8k",), repeats=1)
    measured: list[str] = []

    def counts(point: Point, workload: Workload) -> SweepRecord:
        record = record_of(point, workload)
        measured.append(record.point_id)
        return record

    def run(path: Path) -> None:
        with open_results(path) as file:
            run_sweep(grid.points(), workloads, counts, file)

    run(undisturbed)
    wanted = undisturbed.read_bytes()
    finished = {record.point_id for record in read_results(undisturbed) if record.error is None}
    assert 0 < len(finished) < len(grid.points())
    for last in itertools.count():
        measured.clear()
        died = False
        for _ in range(times):
            with monkeypatch.context() as patch, suppress(Killed):
                system = DyingSystem(last)
                patch.setattr(results, "os", system)
                run(disturbed)
            died |= system.died
        run(disturbed)
        assert disturbed.read_bytes() == wanted
        assert set(os.listdir(tmp_path)) == {undisturbed.name, disturbed.name}
        # What was on the disk was not measured again; what a kill took in the midst of its write was.
        assert sum(map(measured.count, finished)) <= len(finished) + times
        assert all(key in measured for key in finished)
        disturbed.unlink()
        if not died:
            break
    assert last > 2 * len(grid.points())


def test_failed_points_are_tried_again_and_finished_ones_are_not(
    workloads: Mapping[str, Workload], record_of: Callable[[Point, Workload], SweepRecord], tmp_path: Path
) -> None:
    path = tmp_path / "results.jsonl"
    first = sweep(path, workloads, record_of)
    failures = 3 * 2 * 2  # repeats, data sets, drafters
    assert (first.num_skipped, len(first.failures)) == (0, failures)
    assert first.num_finished == len(GRID.points()) - failures
    order = [record.point_id for record in read_results(path)]
    again = sweep(path, workloads, record_of)
    assert (again.num_finished, again.num_skipped, len(again.failures)) == (0, first.num_finished, failures)

    def mended(point: Point, workload: Workload) -> SweepRecord:
        return replace(record_of(point, workload), error=None)

    last = sweep(path, workloads, mended)
    assert (last.num_finished, last.num_skipped, last.failures) == (failures, first.num_finished, ())
    assert [record.point_id for record in read_results(path)] == order
    assert all(record.error is None for record in read_results(path))


PROCESS = """
import os, sys
import torch.distributed as dist
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from compressed_spec.measure.datasets import Dataset, Prompt, Task
from compressed_spec.measure.point import Workload
from compressed_spec.measure.processes import from_first, is_first_process, num_processes
from compressed_spec.measure.record import SweepRecord
from compressed_spec.measure.results import open_results
from compressed_spec.measure.sweep import Grid, run_sweep

dist.init_process_group("gloo")
path, model = sys.argv[1], SweepRecord.from_json(Path(sys.argv[2]).read_text())
grid = Grid(trees=("off", "s3_k2_d6"), drafters=("auto",), batch_sizes=(1, 2), temperatures=(0.0,),
            datasets=("gsm8k",), arrival_rates=(None,), repeats=1)
workload = Workload(dataset=Dataset(name="gsm8k", task=Task.CHAT, prompts=(Prompt(id="0", text=""),)),
                    prompts_ids=((1,),), setup=model.setup)
measured = []

def measure(point, workload):
    measured.append(f"{point.tree} x{point.batch_size}")
    assert from_first(os.environ["RANK"]) == "0"
    return replace(model, **asdict(point), point_id=workload.point_id(point))

with open_results(path) if is_first_process() else nullcontext() as results:
    run_sweep(grid.points(), {"gsm8k": workload}, measure, results)
assert num_processes() == 2
Path(f"{path}.{os.environ['RANK']}").write_text(",".join(measured))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_of_two_processes_the_first_writes_and_both_measure_the_same(make_record: MakeRecord, tmp_path: Path) -> None:
    path, model = tmp_path / "results.jsonl", tmp_path / "model.json"
    model.write_text(make_record().to_json())
    script = tmp_path / "process.py"
    script.write_text(PROCESS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for turn in range(2):
        subprocess.run([*command, str(script), str(path), str(model)], check=True, capture_output=True)
        measured = [Path(f"{path}.{rank}").read_text() for rank in range(2)]
        assert measured[0] == measured[1]
        assert len(measured[0].split(",")) == (4 if turn == 0 else 2)
        assert len(read_results(path)) == 4
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(itertools.islice(lines, 2)))
