"""Prompts of each source, in the formats that their publishers use."""

import json
from collections import Counter
from pathlib import Path

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from compressed_spec.measure.datasets import BUNDLED, SOURCES, Prompt, Task, read_dataset

EXCERPT = Path(__file__).parent.parent / "data" / "gsm8k" / "test_excerpt.jsonl"


def write_lines(path: Path, *items: object) -> str:
    path.write_text("".join(f"{json.dumps(item, ensure_ascii=False)}\n" for item in items), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("name", SOURCES)
def test_the_bundled_prompts(name: str) -> None:
    found = read_dataset(name, 64)
    assert len({prompt.id for prompt in found.prompts}) == 64
    assert all(prompt.text == prompt.text.strip() != "" for prompt in found.prompts)
    assert read_dataset(name, 5).prompts == found.prompts[:5]
    with pytest.raises(ValueError, match=f"{name}:FILE"):
        read_dataset(name, 65)
    assert name in (BUNDLED / "README.md").read_text()


def test_gsm8k_is_the_start_of_the_test_part() -> None:
    items = [json.loads(line) for line in EXCERPT.read_text().splitlines()]
    found = read_dataset("gsm8k", 64)
    assert found.task is Task.MATH
    assert [(one.text, one.answer) for one in found.prompts] == [(i["question"].strip(), i["answer"]) for i in items]
    assert read_dataset(f"gsm8k:{EXCERPT}", 64).prompts == found.prompts


def test_mbpp_is_of_the_test_part() -> None:
    found = read_dataset("mbpp", 64)
    assert found.task is Task.CODE
    assert all(11 <= int(prompt.id) <= 510 for prompt in found.prompts)


def test_mbpp_leaves_out_what_is_trained_on(tmp_path: Path) -> None:
    items: list[dict[str, object]] = [
        {"task_id": n, "text": f"Task {n}.", "code": "x", "test_list": []} for n in (1, 10, 11, 510, 511, 601)
    ]
    name = f"mbpp:{write_lines(tmp_path / 'mbpp.jsonl', *items)}"
    assert [prompt.id for prompt in read_dataset(name, 2).prompts] == ["11", "510"]
    with pytest.raises(ValueError, match="has 2 prompts"):
        read_dataset(name, 3)


def test_spec_bench_mixes_its_categories() -> None:
    prompts = read_dataset("spec_bench", 64).prompts
    assert len(Counter(prompt.category for prompt in prompts[:13])) == 13
    assert Counter(prompt.category for prompt in prompts)["translation"] == 10


def test_sharegpt(tmp_path: Path) -> None:
    items = [
        {"id": "a_0", "conversations": [{"from": "human", "value": " Hello "}, {"from": "gpt", "value": "Hi"}]},
        {"id": "b_0", "conversations": [{"from": "gpt", "value": "I begin"}]},
        {"id": "c_0", "conversations": []},
        {"id": "d_0", "conversations": [{"from": "human", "value": "  "}]},
        {"id": "e_0", "conversations": [{"from": "human", "value": "Zwei\u2028Zeilen"}]},
    ]
    path = tmp_path / "ShareGPT.json"
    path.write_text(json.dumps(items, ensure_ascii=False), encoding="utf-8")
    found = read_dataset(f"sharegpt:{path}", 2)
    assert found.task is Task.CHAT
    assert found.prompts == (Prompt(id="a_0", text="Hello"), Prompt(id="e_0", text="Zwei\u2028Zeilen"))


def test_a_file_of_prompts(tmp_path: Path) -> None:
    name = write_lines(
        tmp_path / "prompts.jsonl", "One\u2028two", {"prompt": " Three "}, {"prompt": "4", "id": 7, "category": "x"}
    )
    assert read_dataset(name, 3).prompts == (
        Prompt(id="0", text="One\u2028two"),
        Prompt(id="1", text=" Three "),
        Prompt(id="7", text="4", category="x"),
    )


def test_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "test.parquet"
    pyarrow.parquet.write_table(pa.table({"question": ["One?", "Two?"], "answer": ["#### 1", "#### 2"]}), path)
    asked = []

    def download(repo_id: str, filename: str, *, repo_type: str) -> str:
        asked.append((repo_id, filename, repo_type))
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    found = read_dataset("gsm8k:hub", 2)
    assert [(prompt.text, prompt.answer) for prompt in found.prompts] == [("One?", "#### 1"), ("Two?", "#### 2")]
    assert asked == [("openai/gsm8k", "main/test-00000-of-00001.parquet", "dataset")]
    assert read_dataset(f"gsm8k:{path}", 2).prompts == found.prompts

    def fails(*_: object, **__: object) -> str:
        raise LocalEntryNotFoundError("offline")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fails)
    with pytest.raises(ValueError, match="gsm8k:FILE"):
        read_dataset("gsm8k:hub", 2)
    with pytest.raises(ValueError, match="spec_bench:FILE"):
        read_dataset("spec_bench:hub", 2)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("nonsense", None),
        ("sharegpt", None),
        ("gsm8k:{}", None),
        ("sharegpt:{}", "{"),
        ("sharegpt:{}", '{"id": 1}'),
        ("sharegpt:{}", '[{"id": 1}]'),
        ("gsm8k:{}", '{"question": "One?"}'),
        ("gsm8k:{}", '{"question": 1, "answer": ""}'),
        ("gsm8k:{}", "[1]"),
        ("mbpp:{}", '{"text": "One?"}'),
        ("spec_bench:{}", '{"question_id": 1, "category": "x", "turns": []}'),
        ("{}", "no JSON"),
        ("{}", '{"text": "no prompt"}'),
        ("{}", '{"prompt": 3}'),
        ("{}", "7"),
        ("{}", "\udcff"),
    ],
)
def test_what_is_refused(tmp_path: Path, name: str, content: str | None) -> None:
    path = tmp_path / "data.json"
    if content is not None:
        path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError):
        read_dataset(name.format(path), 1)
