"""The demo decodes one prompt three ways, shows what each took and says whether the texts are equal."""

import re
from pathlib import Path
from typing import Any

import pytest

from compressed_spec import demo
from compressed_spec.decode import Request
from compressed_spec.generate import make_requests as requests_with_one_seed
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint
from compressed_spec.text import load_tokenizer

EQUAL = "All three texts are the same, token for token."


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return make_tiny_checkpoint(
        folder,
        compress_ratios=(0, 4),
        hidden_size=64,
        head_dim=32,
        moe_intermediate_size=32,
        n_routed_experts=2,
        eos_token_id=None,
    )


def rows(printed: str) -> dict[str, list[str]]:
    """The table's rows by label."""
    found = [re.split(r"\s+|\u2502", line.strip(" \u2502")) for line in printed.splitlines()]
    return {row[0]: [cell for cell in row[1:] if cell] for row in found if row[0] in ("off", "chain", "tree")}


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_the_table_and_the_statement(tiny: Path, capsys: pytest.CaptureFixture[str], temperature: float) -> None:
    demo.main([str(tiny), "--prompt", "One, [two]", "--max-new-tokens", "16", "--temperature", str(temperature)])
    printed = capsys.readouterr().out
    assert "One, [two]" in printed
    assert printed.rstrip().endswith(EQUAL)
    table = rows(printed)
    assert [row[0] for row in table.values()] == ["off", "s3_k1_d4", "s3_k2_d6"]
    assert table["off"][1:3] == ["15", "1.00"]
    assert table["off"][4] == "1.00x"
    assert all(
        int(row[1]) <= 15 and float(row[2]) >= 1 and re.fullmatch(r"\d+\.\d\dx", row[4]) for row in table.values()
    )


def test_trees_are_the_users_to_choose(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.main([str(tiny), "--max-new-tokens", "6", "--tree", "s1_k2_d3", "--chain", "s1_k1_d2"])
    printed = capsys.readouterr().out
    assert [row[0] for row in rows(printed).values()] == ["off", "s1_k1_d2", "s1_k2_d3"]
    assert EQUAL in printed


def test_a_text_of_one_token(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo.main([str(tiny), "--max-new-tokens", "1"])
    printed = capsys.readouterr().out
    assert [row[1:] for row in rows(printed).values()] == [["0", "0.00", "0.0", "-"]] * 3
    assert EQUAL in printed


def test_without_a_model_it_makes_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "DEMO", tmp_path)
    demo.main(["--max-new-tokens", "4"])
    printed = capsys.readouterr().out
    assert "random weights" in printed
    assert EQUAL in printed


def test_texts_that_differ_are_no_success(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three seeds instead of one."""
    seeds = iter(range(100))

    def make_requests(*arguments: Any, **options: Any) -> list[Request]:
        return requests_with_one_seed(*arguments, **options | {"seed": next(seeds)})

    monkeypatch.setattr(demo, "make_requests", make_requests)
    with pytest.raises(SystemExit) as stop:
        demo.main([str(tiny), "--max-new-tokens", "8", "--temperature", "1"])
    assert stop.value.code == 1
    printed = capsys.readouterr().out
    assert "The texts differ" in printed
    assert EQUAL not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/nowhere"], "demo: /nowhere does not exist: give a checkpoint folder or a Hugging Face repo id"),
        (["TINY", "--tree", "wide"], "Unknown tree 'wide'"),
        (["TINY", "--chain", "s3_k1_d5"], "write s3_k1_d4"),
        (["TINY", "--prompt", ""], "A prompt is empty"),
        (["TINY", "--max-new-tokens", "0"], "max_new_tokens must be an int of at least 1"),
        (["TINY", "--temperature", "-1"], "temperature must be"),
        (["TINY", "--seed", "x"], "argument --seed"),
    ],
)
def test_faults_end_it_with_2(
    tiny: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        demo.main([str(tiny) if argument == "TINY" else argument for argument in arguments])
    assert stop.value.code == 2
    out, err = capsys.readouterr()
    assert message in err
    assert len(err.splitlines()) <= 6
    assert EQUAL not in out


def test_drafted_tokens_are_marked(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text is the decoded text; its drafted parts are coloured, or in brackets where there are no colours."""
    marked: list[Any] = []
    original = demo._marked

    def record(chunks: Any, tokenizer: Any, *, colours: bool) -> Any:
        marked.append((chunks, *(original(chunks, tokenizer, colours=coloured) for coloured in (True, False))))
        return original(chunks, tokenizer, colours=colours)

    monkeypatch.setattr(demo, "_marked", record)
    demo.main([str(tiny), "--max-new-tokens", "24"])
    chunks, coloured, bracketed = marked[0]
    tokens = [token for chunk in chunks for token in chunk.token_ids]
    assert coloured.plain == load_tokenizer(tiny).decode(tokens, skip_special_tokens=True)
    parts = [coloured.plain[span.start : span.end] for span in coloured.spans if span.style == demo.DRAFTED]
    assert 0 < len(parts) <= sum(chunk.num_accepted > 0 for chunk in chunks)
    assert all(f"[{part}]" in bracketed.plain for part in parts)
    assert len(bracketed.plain) == len(coloured.plain) + 2 * len(parts)
