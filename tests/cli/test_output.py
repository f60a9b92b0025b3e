"""What the command line prints."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compressed_spec import generate, load_model
from compressed_spec.text import load_tokenizer

# What it prints


def expected(folder: Path, prompts: list[str], **options: Any) -> tuple[list[list[int]], list[str]]:
    """Token ids and texts by the Python interface, without speculation."""
    tokenizer = load_tokenizer(folder)
    outs = generate(
        load_model(folder, progress=False),
        [tokenizer(prompt)["input_ids"] for prompt in prompts],
        tree="off",
        **options,
    )
    return [out.token_ids for out in outs], [tokenizer.decode(out.token_ids, skip_special_tokens=True) for out in outs]


@pytest.mark.parametrize("tree", ["off", "s3_k1_d4", "s3_k2_d6"])
def test_text_is_that_of_python_whatever_the_tree(run: Callable[..., Any], tiny: Path, tree: str) -> None:
    _, texts = expected(tiny, ["One, two"], max_new_tokens=16)
    ran = run("generate", tiny, "--prompt", "One, two", "--max-new-tokens", 16, "--tree", tree)
    assert (ran.code, ran.out) == (0, texts[0] + "\n")
    assert "16 tokens in" in ran.err


def test_json_is_one_object_a_line_and_nothing_else(run: Callable[..., Any], tiny: Path, tmp_path: Path) -> None:
    prompts = ["One, two", "The river\nwas", "caf\u00e9"]
    (tmp_path / "prompt.txt").write_text(prompts[2], encoding="utf-8")
    options = ["--temperature", 0.8, "--seed", 7, "--max-new-tokens", 12, "--batch-size", 2, "--json"]
    ran = run(
        "generate",
        tiny,
        "--prompt",
        prompts[0],
        "--prompt",
        prompts[1],
        "--prompt-file",
        tmp_path / "prompt.txt",
        *options,
    )
    assert ran.code == 0
    ids, texts = expected(tiny, prompts, max_new_tokens=12, temperature=0.8, seed=7)
    objects = [json.loads(line) for line in ran.out.splitlines()]
    assert [found["token_ids"] for found in objects] == ids
    assert [found["text"] for found in objects] == texts
    assert {found["finish_reason"] for found in objects} <= {"stop", "length"}
    for found in objects:
        stats = found["stats"]
        assert stats["num_accepted_tokens"] == sum(stats["num_accepted_tokens_per_pos"])
        assert stats["num_rounds"] + stats["num_accepted_tokens"] + 1 >= 12
        assert stats["times"].keys() == {"prefill", "draft", "verify", "sample", "commit", "other"}


def test_a_single_prompts_json_is_one_object(run: Callable[..., Any], tiny: Path) -> None:
    ran = run("generate", tiny, "--prompt", "One", "--max-new-tokens", 3, "--json")
    assert json.loads(ran.out)["finish_reason"] == "length"
    assert len(ran.out.splitlines()) == 1


def test_T34_streamed_chunks_are_the_text(run: Callable[..., Any], tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, texts = expected(tiny, ["One, two"], max_new_tokens=24)
    written: list[str] = []
    original = sys.stdout.write

    def write(text: str) -> int:
        written.append(text)
        return original(text)

    monkeypatch.setattr(sys.stdout, "write", write)
    ran = run("generate", tiny, "--prompt", "One, two", "--max-new-tokens", 24, "--stream")
    assert ran.out == texts[0] + "\n"
    assert len([text for text in written if text.strip()]) > 5


@pytest.mark.parametrize("arguments", [("-",), ("--prompt-file", "-")])
def test_the_prompt_comes_from_standard_input(
    run: Callable[..., Any], tiny: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("caf\u00e9\n".encode())))
    ran = run("generate", tiny, *arguments, "--max-new-tokens", 6, "--json")
    assert json.loads(ran.out)["token_ids"] == expected(tiny, ["caf\u00e9\n"], max_new_tokens=6)[0][0]


@pytest.mark.parametrize("tree", ["off", "s3_k2_d6"])
def test_T29_text_ends_before_a_stop_string(run: Callable[..., Any], tiny: Path, tree: str) -> None:
    ids, texts = expected(tiny, ["One, two"], max_new_tokens=24)
    stop = texts[0][7:10]
    ran = run(
        "generate", tiny, "--prompt", "One, two", "--max-new-tokens", 24, "--stop", stop, "--json", "--tree", tree
    )
    found = json.loads(ran.out)
    assert found["text"] == texts[0][: texts[0].index(stop)]
    assert found["finish_reason"] == "stop"
    assert found["token_ids"] == ids[0][: len(found["token_ids"])]
    assert len(found["token_ids"]) < 24


def test_chat_is_rendered_before_it_is_continued(run: Callable[..., Any], tiny: Path) -> None:
    arguments = ["--max-new-tokens", 8, "--json"]
    plain = "<\uff5cbegin\u2581of\u2581sentence\uff5c>Be brief.<\uff5cUser\uff5c>Hello<\uff5cAssistant\uff5c></think>"
    chat = run("generate", tiny, "--prompt", "Hello", "--chat", "--system", "Be brief.", *arguments)
    text = run("generate", tiny, "--prompt", plain, *arguments)
    other = run("generate", tiny, "--prompt", "Hello", *arguments)
    assert json.loads(chat.out)["token_ids"] == json.loads(text.out)["token_ids"]
    assert json.loads(chat.out)["token_ids"] != json.loads(other.out)["token_ids"]


def test_inspect_prints_a_table_or_one_object(run: Callable[..., Any], tiny: Path) -> None:
    table = run("inspect", tiny)
    assert (table.code, table.err) == (0, "")
    assert "sliding, CSA/4" in table.out
    found = json.loads(run("inspect", tiny, "--batch-size", 2, "--max-length", 64, "--json").out)
    assert (found["draft_head"], found["batch_size"], found["max_length"], found["problems"]) == ("mtp", 2, 64, [])
    cache = load_model(tiny, progress=False).new_cache(batch_size=2, max_length=64)
    assert found["cache_bytes"] == cache.nbytes
