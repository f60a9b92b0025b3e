"""`compressed-spec plan` from the outside."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ACCEPTANCE = {"acceptance": [[0.8, 0.1], [0.7, 0.1], [0.6, 0.1]], "temperature": 0.0}


@pytest.fixture
def acceptance(tmp_path: Path) -> Path:
    path = tmp_path / "measured.json"
    path.write_text(json.dumps(ACCEPTANCE))
    return path


def test_table(run: Callable[..., Any], acceptance: Path) -> None:
    ran = run("plan", "--tp", 8, "--batch", "1,32", "--context", "4k,1m", "--acceptance", acceptance)
    assert ran.code == 0
    assert "20.4 GiB of weights on each" in ran.out
    assert "6,880 bytes of history" in ran.out
    for words in ("context 4096:", "context 1048576:", "no room", "launches", "routed experts"):
        assert words in ran.out


def test_json(run: Callable[..., Any], acceptance: Path) -> None:
    ran = run(
        "plan", "--config", "v4-pro", "--tp", 8, "--batch", "1..6", "--context", "100", "--nodes", "2,4",
        "--acceptance", acceptance, "--json",
    )  # fmt: skip
    assert ran.code == 0
    plan = json.loads(ran.out)
    assert (plan["config"], plan["device"], plan["num_ranks"]) == ("v4-pro", "h200", 8)
    assert [point["batch_size"] for point in plan["points"]] == [1, 2, 4]
    for point in plan["points"]:
        assert sum(point["plain_parts"].values()) == pytest.approx(point["plain_seconds"])
        assert [one["num_nodes"] for one in point["budgets"]] == [2, 4]
        best = point["best"]
        assert best["seconds"] == pytest.approx(sum(point["best_parts"].values()))


def test_a_rate_stands_for_a_chain(run: Callable[..., Any]) -> None:
    ran = run("plan", "--tp", 8, "--batch", "1", "--acceptance", "0.8", "--nodes", "5", "--drafter", "ngram", "--json")
    tree = json.loads(ran.out)["points"][0]["budgets"][0]["tree"]
    assert tree["name"] == "s4_k1_d5"
    assert tree["tokens"] == pytest.approx(3.3616)
    assert tree["draft_seconds"] == 0


def test_rates_can_be_kept(run: Callable[..., Any], tiny: Path, tmp_path: Path) -> None:
    options = ["--config", tiny, "--acceptance", "0.5", "--context", "64", "--batch", "1", "--json"]
    measured = run("plan", *options, "--device", "cpu", "--save-device", tmp_path / "mine.json")
    again = run("plan", *options, "--device", tmp_path / "mine.json")
    (one,), (other,) = (json.loads(ran.out)["points"] for ran in (measured, again))
    assert one["plain_seconds"] == pytest.approx(other["plain_seconds"])
    assert one["memory_bytes"] == other["memory_bytes"]
    ran = run("plan", "--acceptance", "0.5", "--device", tmp_path / "mine.json")
    assert ran.code == 2
    assert "measured for a model of 2 layers, not 43" in ran.err


def test_a_config_of_ones_own(run: Callable[..., Any], tiny: Path) -> None:
    by_folder = run("plan", "--config", tiny, "--acceptance", "0.5", "--context", "256", "--json")
    by_file = run("plan", "--config", tiny / "config.json", "--acceptance", "0.5", "--context", "256", "--json")
    assert by_folder.code == by_file.code == 0
    assert json.loads(by_folder.out)["points"] == json.loads(by_file.out)["points"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "needs --acceptance"),
        (["--acceptance", "1.5"], "acceptance rate"),
        (["--acceptance", "nowhere.json"], "nowhere.json"),
        (["--acceptance", "0.8", "--config", "v5"], "Unknown config 'v5'"),
        (["--acceptance", "0.8", "--device", "h2000"], "Unknown device 'h2000'"),
        (["--acceptance", "0.8", "--device", "nowhere.json"], "nowhere.json"),
        (["--acceptance", "0.8", "--tp", "3"], "--tp 3 does not divide"),
        (["--acceptance", "0.8", "--batch", "8..1"], "no list of sizes"),
        (["--acceptance", "0.8", "--context", "4q"], "no list of sizes"),
        (["--acceptance", "0.8", "--context", "2m"], "positions"),
        (["--acceptance", "0.8", "--nodes", "1"], "at least 2 nodes"),
        (["--acceptance", "0.8", "--device", "cpu", "--config", "demo", "--tp", "2"], "leave out --tp"),
        (["--check"], "--config demo --device cpu"),
    ],
)
def test_faults(run: Callable[..., Any], arguments: list[str], words: str) -> None:
    ran = run("plan", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err
    assert len(ran.err.splitlines()) <= 6
    assert "Traceback" not in ran.err
