"""The page and its pictures, and results that make none."""

import base64
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from compressed_spec.cli import main
from compressed_spec.measure.record import SweepRecord
from compressed_spec.measure.reporting import report
from compressed_spec.measure.reporting.lanes import lanes
from compressed_spec.measure.reporting.pictures import KINDS
from compressed_spec.measure.reporting.recommend import advise
from compressed_spec.measure.reporting.report import write_report
from compressed_spec.measure.reporting.tables import gain_frames, point_frame
from compressed_spec.measure.reporting.theme import LIGHT, styled

Sweep = Callable[..., list[SweepRecord]]
Save = Callable[[Path, list[SweepRecord]], Path]
SPEEDS = {
    1: {"off": 50.0, "s1_k1_d2": 60.0, "s3_k1_d4": 70.0, "s5_k1_d6": 75.0, "s3_k2_d4": 72.0, "s3_k2_d6": 80.0},
    8: {"off": 50.0, "s1_k1_d2": 45.0, "s3_k1_d4": 40.0, "s5_k1_d6": 38.0, "s3_k2_d4": 41.0, "s3_k2_d6": 39.0},
}
STEMS = ("length", "speed", "gain", "versus", "positions", "stages", "latency")
VOID = ("meta", "img", "source", "br", "link", "hr")


class Page(HTMLParser):
    """What a page refers to, and whether its tags close."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.references: list[str] = []
        self.alts: list[str] = []
        self.tags: list[str] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "srcset", "href", "data", "poster", "action"):
                self.references.append(value or "")
            if name == "alt":
                self.alts.append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


@pytest.fixture(scope="module")
def written(sweep: Sweep, save: Save, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    records = sweep(SPEEDS, datasets=["<b>mb&pp"])
    halves = [save(folder / f"{i}.jsonl", records[i::2]) for i in (0, 1)]
    write_report([str(path) for path in halves], str(folder / "out"))
    return folder / "out"


def test_page_needs_nothing_else(written: Path) -> None:
    text = (written / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert page.references
    assert all(reference.startswith("data:image/png;base64,") for reference in page.references)
    assert not re.search(r"https?://|@import|url\(|<script|<link|<iframe", text)
    assert "b" not in page.tags  # the dataset's name is text
    assert "<b>mb&pp" in page.text
    assert 'name="viewport"' in text
    assert "prefers-color-scheme: dark" in text


def test_every_picture_is_a_file_and_on_the_page(written: Path) -> None:
    names = sorted(path.name for path in written.glob("*.png"))
    assert names == sorted(f"b-mb-pp-{stem}.png" for stem in STEMS)
    page = Page((written / "report.html").read_text())
    embedded = [base64.b64decode(one.partition(",")[2]) for one in page.references]
    assert all(data.startswith(b"\x89PNG") for data in embedded)
    assert {path.read_bytes() for path in written.glob("*.png")} <= set(embedded)
    assert len(set(embedded)) == 2 * len(names)  # one for light pages, one for dark ones
    assert len(page.alts) == len(names)
    assert all(page.alts)


def test_page_says_what_was_planted(written: Path) -> None:
    text = " ".join(Page((written / "report.html").read_text()).text.split())
    assert re.search(
        r"Use s3_k2_d6 at batch 1 \(\+6\d% tokens/s\); speculation off from batch 8, where it is slower\.", text
    )
    for words in (
        "every other way is slower",
        "shown to be the fastest",
        "compressed-spec sweep demo",
        "Chain against",
    ):
        assert words in text
    assert "What failed" not in text


def test_numbers_behind_the_pictures(sweep: Sweep) -> None:
    """Against sums by hand."""
    records = sweep(SPEEDS, num_repeats=1)
    (lane,) = lanes(records)
    frames = gain_frames(lane)
    assert frames is not None
    gain, uncertain = frames

    def speed(batch_size: int, tree: str) -> float:
        (record,) = (one for one in records if one.batch_size == batch_size and one.tree == tree)
        assert record.results is not None
        requests = record.results.requests
        return sum(one.completion_tokens - 1 for one in requests) / sum(one.decode_seconds for one in requests)

    for batch_size, trees in SPEEDS.items():
        for nodes in (2, 4, 6):
            best = max(speed(batch_size, tree) for tree in trees if tree.endswith(f"d{nodes}"))
            assert gain.at[batch_size, nodes] == pytest.approx(best / speed(batch_size, "off") - 1)
    assert not uncertain.to_numpy().any()
    frame = point_frame(lane)
    assert list(frame["tree"]) == [tree for trees in SPEEDS.values() for tree in trees]
    assert frame["tokens/s"][0].startswith(f"{speed(1, 'off'):.1f} (")


@pytest.fixture
def few_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is not about pictures: each takes a while to draw."""
    monkeypatch.setattr(report, "KINDS", KINDS[4:5])


@pytest.mark.usefixtures("few_pictures")
def test_failures_are_told(sweep: Sweep, save: Save, tmp_path: Path) -> None:
    records = sweep(SPEEDS, failing=["s3_k1_d4"])
    records[-1] = replace(records[-1], results=None, error="No memory.")
    path = save(tmp_path / "results.jsonl", records)
    write_report([str(path)], str(tmp_path / "out"))
    text = Page((tmp_path / "out" / "report.html").read_text()).text
    assert "gsm8k, s3_k1_d4, batch 1, repeat 0, request 3: It broke." in text
    assert "gsm8k, s3_k2_d6, batch 8, repeat 1: No memory." in text


def test_little_was_measured(sweep: Sweep) -> None:
    """Only plain decoding, only one chain, only a tree that chooses its own form: fewer pictures, no fault."""
    for trees in (["off"], ["s3_k1_d4"], ["off", "auto"]):
        records = sweep({2: dict.fromkeys(trees, 50.0)}, num_requests=1, num_repeats=1)
        (lane,) = lanes(records)
        with styled(LIGHT):
            drawn = [kind.stem for kind in KINDS if kind.draw(lane, LIGHT) is not None]
        assert {"stages", "latency"} <= set(drawn) < set(STEMS)
        assert [one.sentence for one in advise(records)] == ["No advice at batch 2, where too little was measured."]


def test_batch_sizes_without_drafts_belong_to_the_drafters_lane(sweep: Sweep) -> None:
    (lane,) = lanes(sweep({1: {"off": 50.0}, 2: {"off": 50.0, "s3_k1_d4": 60.0}}))
    assert (list(lane.trees), lane.first, lane.drafter) == ([1, 2], 2, "auto")


@pytest.mark.usefixtures("few_pictures")
def test_pictures_of_several_lanes_have_names_of_their_own(sweep: Sweep, save: Save, tmp_path: Path) -> None:
    other = [one for one in sweep(SPEEDS, drafter="ngram") if one.tree != "off"]
    records = sweep(SPEEDS, datasets=["a b", "a-b"]) + other + sweep(SPEEDS, arrival_rate=2.0)
    written = write_report([str(save(tmp_path / "results.jsonl", records))], str(tmp_path / "out"))
    assert len({path.name for path in written.pictures}) == len(written.pictures) == 4


# The command, and what it refuses


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code: Any = 0
    try:
        main(["report", *map(str, argv)])
    except SystemExit as stop:
        code = stop.code
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.usefixtures("few_pictures")
def test_command(sweep: Sweep, save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "results.jsonl", sweep(SPEEDS))
    code, out, _ = run(capsys, path, "--output", tmp_path / "out")
    assert code == 0
    assert out.startswith("Use s3_k2_d6 at batch 1")
    code, out, _ = run(capsys, path, "--output", tmp_path / "out", "--json")
    found = json.loads(out)
    assert (code, sorted(found)) == (0, ["page", "pictures", "recommendation"])
    assert all(Path(name).is_file() for name in [found["page"], *found["pictures"]])


def damaged(kind: str, records: list[SweepRecord], save: Save, folder: Path) -> list[Path]:
    first = save(folder / "first.jsonl", records)
    if kind == "nowhere":
        return [folder / "nowhere.jsonl"]
    if kind == "twice":
        return [first, first]
    if kind == "folder":
        return [folder]
    if kind == "all failed":
        return [save(folder / "other.jsonl", [replace(one, results=None, error="No.") for one in records])]
    other = folder / "other.jsonl"
    if kind in ("max_new_tokens", "cpu"):
        mixed = replace(records[0], point_id="new")
        if kind == "cpu":
            mixed = replace(mixed, environment=replace(mixed.environment, cpu="Another"))
        else:
            mixed = replace(mixed, setup=replace(mixed.setup, max_new_tokens=99))
        return [first, save(other, [mixed])]
    contents = {
        "empty": "",
        "text": "not a record\n",
        "other json": '{"schema": "another"}\n',
        "cut in the middle": first.read_text()[:500] + "\n" + first.read_text(),
        "missing field": first.read_text().replace('"requests"', '"answers"'),
        "binary": "\0\1",
    }
    other.write_text(contents[kind])
    return [other]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("nowhere", "cannot be read"),
        ("folder", "cannot be read"),
        ("twice", "in the results already"),
        ("all failed", "Every point of these results failed"),
        ("max_new_tokens", "mix max_new_tokens 64 and 99"),
        ("cpu", "mix cpu A processor and Another"),
        ("empty", "has no record"),
        ("text", "Line 1 of"),
        ("other json", "Line 1 of"),
        ("cut in the middle", "Line 1 of"),
        ("missing field", "requests"),
        ("binary", "no results file"),
    ],
)
def test_damaged_or_mixed_results(
    sweep: Sweep, save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str, words: str
) -> None:
    records = sweep({1: {"off": 50, "s3_k1_d4": 60}}, num_repeats=1, num_requests=2)
    code, out, err = run(capsys, *damaged(kind, records, save, tmp_path), "--output", tmp_path / "out")
    assert (code, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("few_pictures")
def test_a_line_that_a_kill_cut_short_is_no_damage(sweep: Sweep, save: Save, tmp_path: Path) -> None:
    path = save(tmp_path / "results.jsonl", sweep({1: {"off": 50, "s3_k1_d4": 60}}))
    path.write_text(path.read_text()[:-100])
    assert write_report([str(path)], str(tmp_path / "out")).page.is_file()


def test_output_that_cannot_be_written(
    sweep: Sweep, save: Save, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = save(tmp_path / "results.jsonl", sweep({1: {"off": 50, "s3_k1_d4": 60}}))
    code, _, err = run(capsys, path, "--output", path)
    assert code == 2
    assert "name a folder" in err


@pytest.mark.parametrize("name", ["pandas", "matplotlib"])
def test_a_library_that_is_not_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    code, _, err = run(capsys, tmp_path / "results.jsonl")
    assert code == 2
    assert err.splitlines() == [
        f"compressed-spec: A report needs {name}, which is not installed: pip install 'compressed-spec[report]'."
    ]


def test_without_results_there_is_no_report(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys)
    assert code == 2
    assert "results" in err.lower()
