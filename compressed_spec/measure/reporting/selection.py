"""Which records a report is of: whole files, of one machine and one setup, cut into lanes that may be compared."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from compressed_spec.measure.compare import OFF, Comparison, Group, Measure, compare
from compressed_spec.measure.record import NO_DRAFTER, RequestRecord, SweepRecord
from compressed_spec.measure.results import read_results


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Load:
    """What is equal all over a recommendation. arrival_rate: None for a fixed number of requests under way."""

    temperature: float
    arrival_rate: float | None

    def __str__(self) -> str:
        load = "" if self.arrival_rate is None else f", {self.arrival_rate:g} requests/s"
        return f"temperature {self.temperature:g}{load}"


def read_all(paths: Sequence[Path]) -> list[SweepRecord]:
    """The records of all files, failed points too.

    Raises ValueError for a file that is damaged or has no record, a point that comes twice, or records of different
    setups, machines or versions, which no report can compare.
    """
    records: dict[str, SweepRecord] = {}
    for path in paths:
        found = read_results(path)
        if not found:
            raise ValueError(f"The results file {path} has no record: wait for a point of the sweep, or name another.")
        for record in found:
            if record.point_id in records:
                raise ValueError(f"{path} holds a point that is in the results already: name each sweep once.")
            records[record.point_id] = record
    _require_one_setup(list(records.values()))
    if not any(record.results is not None for record in records.values()):
        raise ValueError("Every point of these results failed, so there is nothing to report: see their errors.")
    return list(records.values())


def _require_one_setup(records: Sequence[SweepRecord]) -> None:
    first = _conditions(records[0])
    for record in records[1:]:
        for key, value in _conditions(record).items():
            if value != first[key]:
                raise ValueError(
                    f"The results mix {key} {_spoken(first[key])} and {_spoken(value)}: make a report of each."
                )


def _conditions(record: SweepRecord) -> dict[str, object]:
    ignored = ("model", "argv")  # how the user named the checkpoint, and the command
    both = asdict(record.setup) | asdict(record.environment)
    return {key: value for key, value in both.items() if key not in ignored}


def _spoken(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def load_of(record: SweepRecord) -> Load:
    """The load of a record."""
    return Load(temperature=record.temperature, arrival_rate=record.arrival_rate)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Mode:
    """A way to decode: a tree and what drafts it."""

    tree: str
    drafter: str

    @property
    def is_off(self) -> bool:
        return self.tree == OFF


PLAIN = Mode(tree=OFF, drafter=NO_DRAFTER)
ByMode = dict[Mode, list[SweepRecord]]


def pooled(records: Sequence[SweepRecord]) -> dict[tuple[Load, int], ByMode]:
    """By load and batch size, each mode's requests of all datasets together, one record a repeat.

    Modes that lack a dataset or a repeat which others have, or that finished no request, are left out.
    """
    datasets = sorted({record.dataset for record in records})
    found: dict[tuple[Load, int], dict[Mode, dict[int, dict[str, SweepRecord]]]] = {}
    for record in records:
        if record.results is not None:
            here = found.setdefault((load_of(record), record.batch_size), {})
            mode = Mode(tree=record.tree, drafter=record.drafter)
            here.setdefault(mode, {}).setdefault(record.repeat, {})[record.dataset] = record
    return {key: _complete(modes, datasets) for key, modes in found.items()}


def _complete(modes: Mapping[Mode, Mapping[int, Mapping[str, SweepRecord]]], datasets: Sequence[str]) -> ByMode:
    points = {
        mode: {(repeat, dataset) for repeat, some in repeats.items() for dataset in some}
        for mode, repeats in modes.items()
    }
    most = max(points.values(), key=len)
    complete = {
        mode: [_joined([some[name] for name in datasets if name in some]) for _, some in sorted(repeats.items())]
        for mode, repeats in modes.items()
        if points[mode] == most
    }
    return {mode: some for mode, some in complete.items() if any(map(_finished_any, some))}


def _finished_any(record: SweepRecord) -> bool:
    return record.results is not None and any(one.error is None for one in record.results.requests)


def _joined(records: Sequence[SweepRecord]) -> SweepRecord:
    """One record of the requests of several datasets."""
    requests = [one for record in records if record.results is not None for one in record.results.requests]
    joined = with_requests(records[0], requests)
    return replace(joined, dataset=", ".join(record.dataset for record in records))


def with_requests(record: SweepRecord, requests: Sequence[RequestRecord]) -> SweepRecord:
    """A record of these requests, numbered anew, which is how comparisons pair them; its other results stay."""
    assert record.results is not None, "failed records are left out"
    numbered = tuple(replace(one, index=i) for i, one in enumerate(requests))
    return replace(record, results=replace(record.results, requests=numbered))


def comparison(
    group: Group,
    first: str,
    first_records: Sequence[SweepRecord],
    second: str,
    second_records: Sequence[SweepRecord],
) -> Comparison | None:
    """Speed of `second` against `first`; None where no request was finished by both."""
    try:
        return compare(group, first, first_records, second, second_records, Measure.DECODE_THROUGHPUT)
    except ValueError:
        return None


def group_of(record: SweepRecord) -> Group:
    """The group that a comparison of pooled records names."""
    return Group(
        dataset=record.dataset,
        drafter=record.drafter,
        batch_size=record.batch_size,
        temperature=record.temperature,
        arrival_rate=record.arrival_rate,
        conditions="pooled",
    )
