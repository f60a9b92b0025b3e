"""The results file: whole at any moment, whatever it is killed in; one writer; nobody else's file is touched."""

import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from compressed_spec.measure import results
from compressed_spec.measure.record import SweepRecord
from compressed_spec.measure.results import open_results, read_results

MakeRecord = Callable[..., SweepRecord]


class Killed(BaseException):
    """Stands for SIGKILL."""


def write(path: Path, *records: SweepRecord) -> None:
    with open_results(path) as file:
        for record in records:
            file.write(record)


def test_a_file_cut_anywhere_keeps_its_whole_lines(make_record: MakeRecord, tmp_path: Path) -> None:
    records = [make_record("off"), make_record("s3_k1_d4", error="RuntimeError: no memory"), make_record("s3_k2_d6")]
    path = tmp_path / "results.jsonl"
    write(path, *records)
    data = path.read_bytes()
    ends = list(itertools.accumulate(len(record.to_json().encode()) + 1 for record in records))
    assert ends[-1] == len(data)
    cuts = {0, *range(0, len(data), 173), *(end + near for end in [0, *ends] for near in (-2, -1, 0, 1, 2, 40))}
    for cut in sorted(cut for cut in cuts if 0 <= cut <= len(data)):
        path.write_bytes(data[:cut])
        whole = sum(end - 1 <= cut for end in ends)  # without its line break a record is whole all the same
        assert read_results(path) == records[:whole], cut
        with open_results(path) as file:
            assert list(file.records) == records[:whole], cut
            for record in records[whole:]:
                file.write(record)
        assert path.read_bytes() == data, cut


def test_a_retry_takes_the_place_of_the_failure(make_record: MakeRecord, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    failed = make_record("s3_k1_d4", error="RuntimeError: no memory")
    write(path, make_record("off"), failed, make_record("s3_k2_d6"))
    before = path.read_text().splitlines()
    with open_results(path) as file:
        assert file.finished == {"off:0", "s3_k2_d6:0"}
        file.write(make_record("s3_k1_d4"))
        file.write(make_record("s2_k2_d4"))  # and what is added goes to the file that is there now
    after = path.read_text().splitlines()
    assert [before[0], before[2]] == [after[0], after[2]]
    assert [record.tree for record in read_results(path)] == ["off", "s3_k1_d4", "s3_k2_d6", "s2_k2_d4"]
    assert all(record.error is None for record in read_results(path))


class DyingSystem:
    """`os` whose calls number `last` is a process's last one; a write dies after half of its bytes."""

    def __init__(self, last: int) -> None:
        self.left, self.died = last, False

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in ("write", "fsync", "replace"):
            return real

        def call(*arguments: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                if name == "write":
                    os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
                self.died = True
                raise Killed
            return real(*arguments)

        return call


def test_killed_in_any_call_of_a_replacement(
    make_record: MakeRecord, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.jsonl"
    old = [make_record("off"), make_record("s3_k1_d4", error="RuntimeError: no memory")]
    new = [old[0], make_record("s3_k1_d4")]
    seen = []
    for last in itertools.count():
        write(path, *old)
        system = DyingSystem(last)
        with open_results(path) as file, monkeypatch.context() as patch, suppress(Killed):
            patch.setattr(results, "os", system)
            file.write(new[1])
        seen.append(read_results(path))
        assert seen[-1] in (old, new)
        write(path)
        assert read_results(path) == seen[-1]
        assert os.listdir(tmp_path) == [path.name]
        path.unlink()
        if not system.died:
            break
    assert seen == [old, old, old, new, new]  # dead in write, fsync, replace, fsync of the folder; and alive


def test_one_writer_at_a_time(make_record: MakeRecord, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    with open_results(path) as file:
        for turn in range(2):
            with pytest.raises(ValueError, match="Another process"), open_results(link):
                pass
            file.write(make_record("off", error="no" if turn == 0 else None))  # the second time by a rename
        file.write(make_record("s3_k1_d4"))
        with pytest.raises(ValueError, match="Another process"), open_results(path):
            pass
        assert len(read_results(path)) == 2  # reading needs no turn
    with open_results(link) as file:
        assert len(file.records) == 2
        file.write(make_record("off"))
    assert link.is_symlink()


@pytest.mark.parametrize("content", ["my notes", "my notes\n", '{"tree": "off"}\n', "\n", '{"schema": "other"'])
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"notes\.txt"), open_results(path):
        pass
    assert path.read_text() == content


def test_a_point_that_is_there_twice_is_refused(make_record: MakeRecord, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text(f"{make_record().to_json()}\n" * 2)
    with pytest.raises(ValueError, match="Line 2"):
        read_results(path)


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be written"), open_results(tmp_path / "none" / "results.jsonl"):
        pass
    with pytest.raises(ValueError, match="cannot be read"):
        read_results(tmp_path / "none.jsonl")
