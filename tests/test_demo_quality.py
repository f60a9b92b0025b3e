"""The bundled checkpoint speaks: whole answers, no loops, and drafts that its own model accepts."""

import json
from pathlib import Path

import pytest

from compressed_spec.models.deepseek_v4.load import DEMO
from compressed_spec.training.corpus import PROMPT_TEMPLATE, read_gsm8k
from compressed_spec.training.gate import GateResult, measure_gate

EXCERPT = Path(__file__).parent / "data" / "gsm8k" / "test_excerpt.jsonl"


@pytest.fixture(scope="module")
def gate() -> GateResult:
    problems = read_gsm8k(EXCERPT)
    return measure_gate(DEMO, [p.prompt for p in problems], [p.completion for p in problems], progress=False)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_demo_answers_problems_it_was_not_trained_on(gate: GateResult) -> None:
    assert gate.well_formed >= 0.8, gate


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_demo_accepts_its_own_drafts(gate: GateResult) -> None:
    assert gate.acceptance_length >= 2.5, gate


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_demo_seldom_loops(gate: GateResult) -> None:
    assert gate.looping < 0.05, gate


def test_demo_is_small_and_says_how_to_be_asked() -> None:
    assert sum(file.stat().st_size for file in DEMO.iterdir()) <= 16 * 2**20
    assert (DEMO / "prompt_template.txt").read_text(encoding="utf-8") == PROMPT_TEMPLATE
    settings = json.loads((DEMO / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert settings["prompt_template"] == PROMPT_TEMPLATE
