"""A sweep's results file: one record a line, whole at any moment, written by one process at a time.

A new record is appended, and a line that a kill cut short is removed when the file is next opened: its record was
never reported as written. A record that replaces another goes in with a rename, which happens wholly or not at all.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from compressed_spec.measure.record import SCHEMA, SweepRecord

_BEGINNING = f'{{"schema": "{SCHEMA}"'.encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Contents:
    """records: in the file's order. half: bytes of a last line that was not written to its end. unended: a last line is
    whole but for its line break."""

    records: tuple[SweepRecord, ...]
    half: int
    unended: bool


def read_results(path: str | Path) -> list[SweepRecord]:
    """The records of a results file, also of one that is being written; a half-written last line is left out.

    Raises ValueError for a file that cannot be read or holds anything else.
    """
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(f"The results file {path} cannot be read ({error.strerror}): check its name.") from error
    return list(_parse(path, data).records)


def _parse(path: Path, data: bytes) -> _Contents:
    *lines, rest = data.split(b"\n")
    records: dict[str, SweepRecord] = {}
    for number, line in enumerate(lines, start=1):
        record = _record(path, number, line)
        if record.point_id in records:
            raise ValueError(f"Line {number} of {path} is a point that an earlier line holds: remove one of them.")
        records[record.point_id] = record
    try:
        last = SweepRecord.from_json(rest.decode())
    except ValueError as error:
        # Whose file is it? What is cut off must have been on its way to being a record.
        if not rest.startswith(_BEGINNING[: len(rest)]):
            raise ValueError(
                f"{path} is no results file of a sweep: its last line is another's. Name another."
            ) from error
        return _Contents(records=tuple(records.values()), half=len(rest), unended=False)
    return _Contents(records=(*records.values(), last), half=0, unended=True)


def _record(path: Path, number: int, line: bytes) -> SweepRecord:
    try:
        return SweepRecord.from_json(line.decode())
    except ValueError as error:  # UnicodeDecodeError is one
        raise ValueError(f"Line {number} of {path} cannot be used: {error} Name another file, or remove it.") from error


class ResultsFile:
    """The records of a results file that is open for writing; `open_results` makes one."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor
        data = _read_all(descriptor)
        contents = _parse(path, data)
        self._records = {record.point_id: record for record in contents.records}
        self.num_bytes_removed = contents.half
        if contents.half:
            os.ftruncate(descriptor, len(data) - contents.half)
            os.fsync(descriptor)
        elif contents.unended:
            _write_all(descriptor, b"\n")

    @property
    def records(self) -> tuple[SweepRecord, ...]:
        """In the order of the lines."""
        return tuple(self._records.values())

    @property
    def finished(self) -> frozenset[str]:
        """Ids of the points that have results; those that failed are not among them."""
        return frozenset(key for key, record in self._records.items() if record.error is None)

    def write(self, record: SweepRecord) -> None:
        """Add a record, or put it in the place of its point's; it is on the disk on return."""
        replaces = record.point_id in self._records
        self._records[record.point_id] = record
        if replaces:
            self._rewrite()
        else:
            _write_all(self._descriptor, _line(record))

    def close(self) -> None:
        """Give the file to the next writer."""
        os.close(self._descriptor)

    def _rewrite(self) -> None:
        partial = _partial(self._path)
        new = os.open(partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o644)
        try:
            fcntl.flock(new, fcntl.LOCK_EX)  # before it has the name, so that nobody comes in between
            _write_all(new, b"".join(map(_line, self._records.values())))
            os.replace(partial, self._path)
            _sync_folder(self._path.parent)
        except BaseException:
            os.close(new)
            raise
        os.close(self._descriptor)
        self._descriptor = new


@contextmanager
def open_results(path: str | Path) -> Iterator[ResultsFile]:
    """The file, made if it is not there, repaired, and locked against other writers until the block is left.

    Raises ValueError if another process writes it, or if it is no results file; it is left as it is then.
    """
    path = Path(path).expanduser().resolve()  # a rename would put a file in a link's place
    descriptor = _locked(path)
    try:
        _partial(path).unlink(missing_ok=True)
        _sync_folder(path.parent)
        file = ResultsFile(path, descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    try:
        yield file
    finally:
        file.close()


def _locked(path: Path) -> int:
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ValueError(f"The results file {path} cannot be written ({error.strerror}): name another.") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except BlockingIOError as error:
            os.close(descriptor)
            raise ValueError(f"Another process is writing {path}: wait for it, or name another file.") from error
        except FileNotFoundError:
            pass  # replaced since it was opened, and not there for a moment: open what is there now
        os.close(descriptor)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def _line(record: SweepRecord) -> bytes:
    return record.to_json().encode() + b"\n"


def _read_all(descriptor: int) -> bytes:
    with os.fdopen(os.dup(descriptor), "rb") as file:
        file.seek(0)
        return file.read()


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.fsync(descriptor)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
