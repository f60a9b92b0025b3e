"""`compressed-spec bench` on a small checkpoint: what it prints, and what it refuses."""

import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from compressed_spec.cli import main
from compressed_spec.measure import bench
from compressed_spec.measure.bench_report import HEADLINES
from compressed_spec.measure.sides import TransformersSide, transformers_side
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint

SIDES = ("transformers", "off", "chain", "tree")
SMALL = [
    *("--context", "24", "--long-context", "60", "--max-new-tokens", "12", "--num-prompts", "2", "--repeats", "1"),
    *("--batch-sizes", "1", "2", "--chains", "s1_k1_d2", "--trees", "s2_k2_d5"),
    "--no-compile",
]


@pytest.fixture(scope="module")
def printed(tiny: Path) -> list[str]:
    """Lines that one run with a table printed."""
    lines: list[str] = []

    def put(*values: object, **options: object) -> None:
        if "file" not in options:
            lines.append(str(values[0]))

    def show(console: object, shown: object) -> None:
        lines.append(type(shown).__name__)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.print", put)
        patch.setattr("rich.console.Console.print", show)
        main(["bench", str(tiny), *SMALL])
    return lines


@pytest.fixture(scope="module")
def found(printed: list[str]) -> dict[str, Any]:
    """The JSON of the last line."""
    report: dict[str, Any] = json.loads(printed[-1])
    return report


def numbers(value: object) -> Iterator[float]:
    """All numbers of a JSON value."""
    if isinstance(value, dict):
        for inner in value.values():
            yield from numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def test_tables_come_before_the_line(printed: list[str]) -> None:
    assert printed[:-1].count("Table") == 5
    assert printed[-2] == "str"


def test_every_headline_is_a_plain_number_with_its_spread(found: dict[str, Any]) -> None:
    for name in HEADLINES:
        assert type(found[name]) is float, name
        assert list(found["spread"][name]) == ["min", "q1", "q3", "max"]
    required = "speedup_off speedup_chain speedup_tree tree_over_off verify_d8_over_d1 plan_ms commit_ms"
    assert {*required.split(), "context_8k_over_512", "prefill_speedup", "roof_fraction"} <= HEADLINES.keys()
    assert tuple(found["tokens_per_second"]) == SIDES
    assert list(found["verify_ms"]) == [str(size) for size in range(1, 17)]
    assert {name: list(table) for name, table in found.items() if "_batch_" in name} == {
        f"tokens_per_second_batch_{size}": ["transformers", "off", "tree"] for size in (1, 2)
    }


def test_numbers_are_finite_and_positive(found: dict[str, Any]) -> None:
    measured = {name: value for name, value in found.items() if name not in ("num_differing_texts", "stage_ms", "run")}
    assert all(math.isfinite(number) and number > 0 for number in numbers(measured))
    assert all(math.isfinite(number) for number in numbers(found["stage_ms"]))


def test_ratios_follow_from_the_medians(found: dict[str, Any]) -> None:
    rates, prefill, verify = found["tokens_per_second"], found["prefill_tokens_per_second"], found["verify_ms"]
    token, layers = found["token_ms_by_context"], found["plan_and_commit_ms_by_layers"]
    seconds = found["bytes_per_token"] / found["bandwidth_bytes_per_second"]
    assert {name: pytest.approx(found[name]) for name in HEADLINES if name not in ("plan_ms", "commit_ms")} == {
        **{f"speedup_{side}": rates[side] / rates["transformers"] for side in SIDES[1:]},
        "tree_over_off": rates["tree"] / rates["off"],
        "verify_d8_over_d1": verify["8"] / verify["1"],
        "bookkeeping_by_layers": layers["8"] / layers["2"],
        "context_8k_over_512": token["60"] / token["24"],
        "prefill_speedup": prefill["ours"] / prefill["transformers"],
        "roof_fraction": seconds * rates["off"],
    }


def test_stages_add_up_to_the_round(found: dict[str, Any]) -> None:
    assert list(found["stage_ms"]) == list(SIDES[1:])
    for side, stages in found["stage_ms"].items():
        parts = {stage: time for stage, time in stages.items() if stage != "round"}
        assert list(parts) == ["draft", "verify", "sample", "commit", "other"]
        assert sum(parts.values()) == pytest.approx(stages["round"]), side
        # With one prompt a text, tokens a second are tokens a round over its time.
        rate = 1e3 * found["acceptance_length"][side] / stages["round"]
        assert rate == pytest.approx(found["tokens_per_second"][side])


def test_texts_are_the_same_on_all_sides(found: dict[str, Any]) -> None:
    assert found["num_differing_texts"] == {"transformers": 0, "chain": 0, "tree": 0}
    assert found["num_texts"] == 2
    assert found["logits_difference"] < 1e-5


def test_the_run_is_identified(found: dict[str, Any], tiny: Path) -> None:
    run = found["run"]
    assert run["model"] == str(tiny)
    assert run["threads"] == torch.get_num_threads()
    assert run["versions"]["torch"] == torch.__version__
    assert len(run["checkpoint_sha256"]) == 64
    assert run["machine"]["num_cpus"] >= 1
    assert run["environment"].get("OMP_NUM_THREADS") == os.environ.get("OMP_NUM_THREADS")
    assert {"argv", "git_revision", "dtype", "numerics", "prompts"} <= run.keys()
    assert found["options"]["context"] == 24


def test_random_weights_say_nothing_of_speculation(run: Callable[..., Any], copy: Path) -> None:
    """With --json standard output is the one line; without a tokenizer prompts are random tokens."""
    (copy / "tokenizer.json").unlink()
    ran = run("bench", copy, *SMALL, "--batch-sizes", 1, "--json", "--random-weights", "--threads", 1)
    assert ran.code == 0
    [line] = ran.out.splitlines()
    found = json.loads(line)
    assert ran.err == ""
    silent = ("speedup_chain", "speedup_tree", "tree_over_off")
    assert all(found[name] is None and found["spread"][name] is None for name in silent)
    assert found["speedup_off"] > 0
    assert found["tokens_per_second"]["tree"] > 0


def test_no_speed_is_compared_with_another_model(
    run: Callable[..., Any], tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other_side(model: DeepseekV4, folder: Path) -> TransformersSide:
        side = transformers_side(model, folder)
        norm: torch.nn.Parameter = side.model.model.layers[1].post_attention_layernorm.weight
        norm.data = norm.data * 1.05
        return side

    monkeypatch.setattr(bench, "transformers_side", other_side)
    ran = run("bench", tiny, *SMALL, "--json")
    assert ran.code == 2
    assert ran.out == ""
    assert "transformers' logits differ from ours by" in ran.err
    assert "not compared" in ran.err


REFUSALS: list[tuple[list[str], tuple[str, ...]]] = [
    (["--context", "0"], ("context must be at least 1, got 0",)),
    (["--max-new-tokens", "1"], ("max_new_tokens must be at least 2, got 1",)),
    (["--num-prompts", "0"], ("num_prompts must be at least 1",)),
    (["--num-prompts", "15"], ("15 prompts to measure and 4 others", "the 16 there are", "lower num_prompts")),
    (["--repeats", "0"], ("repeats must be at least 1",)),
    (["--threads", "0"], ("--threads must be at least 1",)),
    (["--long-context", "24"], ("long_context (24) must be above context (24)",)),
    (["--long-context", "512"], ("long_context 512", "the model's 512 positions", "lower long_context")),
    (["--context", "511", "--long-context", "512"], ("context 511", "the model's 512 positions", "lower context")),
    (["--batch-sizes", "0"], ("batch_sizes must be at least 1 each, got [0]",)),
    (["--chains", "s2_k2_d5"], ("chains must name chains (k1), got s2_k2_d5",)),
    (["--trees", "s1_k1_d2"], ("trees must name trees (k2 or more), got s1_k1_d2",)),
    (["--trees", "off"], ("trees must name trees",)),
    (["--trees", "wide"], ("Unknown tree 'wide'",)),
    (["--drafter", "eagle"], ("Unknown drafter 'eagle'",)),
    (["--against", "vllm"], ("--against", "transformers")),
    (["--dtype", "float64"], ("--dtype", "bfloat16")),
    (["--prompts", "/nowhere.jsonl"], ("The prompts in /nowhere.jsonl cannot be read", "name a JSONL file")),
]


@pytest.mark.parametrize(("arguments", "parts"), REFUSALS, ids=lambda value: "-".join(value)[:40])
def test_T36_a_faulty_argument(
    run: Callable[..., Any], tiny: Path, arguments: list[str], parts: tuple[str, ...]
) -> None:
    ran = run("bench", tiny, *SMALL, "--json", *arguments)
    assert ran.code == 2, ran
    assert ran.out == ""
    assert "Traceback" not in ran.err
    assert len(ran.err.splitlines()) <= 6
    for part in parts:
        assert part in ran.err, ran.err


def test_T36_a_checkpoint_that_transformers_does_not_know(run: Callable[..., Any], tmp_path: Path) -> None:
    folder = make_tiny_checkpoint(tmp_path, compress_ratios=(0, 16), hidden_size=64, n_routed_experts=2)
    ran = run("bench", folder, *SMALL, "--json")
    assert ran.code == 2
    assert "transformers cannot make a model of" in ran.err


def test_T36_prompts_for_a_checkpoint_without_a_tokenizer(run: Callable[..., Any], copy: Path) -> None:
    (copy / "tokenizer.json").unlink()
    ran = run("bench", copy, *SMALL, "--prompts", "any.jsonl")
    assert ran.code == 2
    assert "has no tokenizer.json: leave out --prompts" in ran.err
