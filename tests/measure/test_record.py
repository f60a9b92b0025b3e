"""A record survives its line of JSON, and what is none is refused."""

import json
from collections.abc import Callable

import pytest

from compressed_spec.measure.record import SweepRecord


def test_a_record_comes_back_from_its_line(make_record: Callable[..., SweepRecord]) -> None:
    for record in (make_record(), make_record(error="RuntimeError: out of memory"), make_record(arrival_rate=2.5)):
        line = record.to_json()
        assert "\n" not in line
        assert SweepRecord.from_json(line) == record


@pytest.mark.parametrize("line", ["", "{", "[]", "3", '{"tree": "off"}', '{"schema": "compressed_spec.sweep/0"}'])
def test_what_is_no_record_is_refused(line: str) -> None:
    with pytest.raises(ValueError, match="It is"):
        SweepRecord.from_json(line)


@pytest.mark.parametrize("path", [("tree",), ("setup", "seed"), ("results", "latency", "p95_itl_ms"), ("results",)])
def test_a_record_without_a_field_is_refused(make_record: Callable[..., SweepRecord], path: tuple[str, ...]) -> None:
    raw = json.loads(make_record().to_json())
    place = raw
    for name in path[:-1]:
        place = place[name]
    del place[path[-1]]
    with pytest.raises(ValueError, match=path[-1]):
        SweepRecord.from_json(json.dumps(raw))
