"""Sweeps: which points, in which order, and a results file that says which of them are done."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from compressed_spec.measure.point import Point, Workload
from compressed_spec.measure.processes import from_first, is_first_process
from compressed_spec.measure.record import NO_DRAFTER, SweepRecord
from compressed_spec.measure.results import ResultsFile

OFF = "off"
Measure = Callable[[Point, Workload], SweepRecord]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The values of each setting; a sweep runs all combinations. arrival_rates: None among them is the closed loop."""

    trees: Sequence[str]
    drafters: Sequence[str]
    batch_sizes: Sequence[int]
    temperatures: Sequence[float]
    datasets: Sequence[str]
    arrival_rates: Sequence[float | None]
    repeats: int

    def points(self) -> list[Point]:
        """Every point once, in the order to run them: repeat after repeat, each of which begins further on in the list.

        So no tree always runs first, or right after another, and a machine that slows down slows down all of them.
        Without speculation there is one point whatever the drafters.
        """
        choices = (
            (dataset, rate, temperature, batch, NO_DRAFTER if tree == OFF else drafter, tree)
            for dataset, rate, temperature, batch, drafter, tree in product(
                self.datasets, self.arrival_rates, self.temperatures, self.batch_sizes, self.drafters, self.trees
            )
        )
        combinations = list(dict.fromkeys(choices))
        points = []
        for repeat in range(self.repeats):
            start = len(combinations) * repeat // self.repeats
            for dataset, rate, temperature, batch, drafter, tree in combinations[start:] + combinations[:start]:
                points.append(
                    Point(
                        tree=tree,
                        drafter=drafter,
                        batch_size=batch,
                        temperature=temperature,
                        dataset=dataset,
                        arrival_rate=rate,
                        repeat=repeat,
                    )
                )
        return points


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Points of a sweep: finished by this run, by earlier ones, and failed in this run."""

    num_finished: int
    num_skipped: int
    failures: tuple[SweepRecord, ...]


def run_sweep(
    points: Iterable[Point],
    workloads: Mapping[str, Workload],
    measure: Measure,
    results: ResultsFile | None,
    on_skip: Callable[[], object] = lambda: None,
) -> Outcome:
    """Measure the points that the results file does not hold yet, or holds as failed, and write each as it ends.

    workloads: by data set. results: None in all processes but the first, which do as it does. on_skip: called for a
    point that is there already.
    """
    assert (results is not None) == is_first_process(), "the first process writes"
    finished = from_first(frozenset[str]() if results is None else results.finished)
    num_finished = num_skipped = 0
    failures = []
    for point in points:
        workload = workloads[point.dataset]
        if workload.point_id(point) in finished:
            num_skipped += 1
            on_skip()
            continue
        record = measure(point, workload)
        if results is not None:
            results.write(record)
        if record.error is None:
            num_finished += 1
        else:
            failures.append(record)
    return Outcome(num_finished=num_finished, num_skipped=num_skipped, failures=tuple(failures))
