"""Trees and drafters by name on the command line, and the script that measures for them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from compressed_spec.cli import main
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint
from compressed_spec.shaping import read_calibration

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "calibrate.py"
PROMPTS = ("One, two, one, two, one,", "A window slides")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), hidden_size=64, compress_ratios=(0, 4))


@pytest.fixture(scope="module")
def measured(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    options = ["--prompt-file", str(folder / "prompts.txt"), "--max-new-tokens", "16", "--temperature", "1"]
    run = subprocess.run(
        [sys.executable, SCRIPT, tiny, folder / "out.json", *options],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert run.stdout.startswith("depth 1 (")
    return folder / "out.json"


def texts(capsys: pytest.CaptureFixture[str], tiny: Path, *options: str) -> list[str]:
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    main(["generate", str(tiny), "--json", "--max-new-tokens", "12", "--temperature", "1", *prompts, *options])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all("num_rounds_off" in line["stats"] for line in lines)
    return [line["text"] for line in lines]


@pytest.mark.filterwarnings("ignore:None of .* tokens drafted")
def test_every_tree_gives_the_same_text(capsys: pytest.CaptureFixture[str], tiny: Path, measured: Path) -> None:
    calibration = read_calibration(str(measured))
    assert calibration.temperature == 1.0
    assert calibration.drafter == "auto"
    assert len(calibration.acceptance) >= 2
    plain = texts(capsys, tiny, "--tree", "off")
    for tree in ("auto", "auto_s2_k2_d5", "dynamic", f"dynamic:{measured}", f"optimal_d6:{measured}"):
        assert texts(capsys, tiny, "--tree", tree) == plain, tree
    for drafter in ("suffix", "compressed_spec.drafting.suffix:SuffixDrafter"):
        assert texts(capsys, tiny, "--tree", "dynamic", "--drafter", drafter) == plain, drafter


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tree", "static:nowhere.json"], "nowhere.json"),
        (["--tree", "optimal"], "not complete"),
        (["--tree", "bushy"], "'auto', 'dynamic'"),
        (["--drafter", "nowhere:Drafter"], "PYTHONPATH"),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], tiny: Path, options: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["generate", str(tiny), "--prompt", "x", *options])
    assert stop.value.code == 2
    fault = capsys.readouterr().err
    assert message in fault
    assert len(fault.splitlines()) == 1
