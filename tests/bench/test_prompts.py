"""Prompts of an exact length, and the files they come from."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from compressed_spec.measure.identity import checkpoint_hash, command_line, peak_memory
from compressed_spec.measure.prompts import BUNDLED, Document, Texts, random_texts, read_texts
from compressed_spec.models.deepseek_v4.load import DEMO
from compressed_spec.text import load_tokenizer

EXCERPT = Path(__file__).parent.parent / "data" / "gsm8k" / "test_excerpt.jsonl"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(DEMO)


@given(st.integers(1, 6), st.integers(0, 9), st.integers(1, 200))
def test_prompts_have_their_length_and_end_with_their_own(num_documents: int, first: int, length: int) -> None:
    """Other documents stand before it, completed; a document's own completion never follows its own prompt."""
    texts = Texts(
        documents=tuple(
            Document(prompt_ids=(100 + i, 200 + i), completion_ids=(300 + i, 400 + i)) for i in range(num_documents)
        )
    )
    for i, prompt in enumerate(texts.prompts(first, 2, length)):
        own = (first + i) % num_documents
        assert len(prompt) == length
        assert prompt[-2:] == [100 + own, 200 + own][-length:]
        if num_documents > 1 and length <= 2 + 4 * (num_documents - 1):
            assert 300 + own not in prompt


@pytest.mark.parametrize("path", [BUNDLED, EXCERPT])
def test_problems_are_put_as_the_demo_was_trained(path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    texts = read_texts(path, DEMO, tokenizer)
    items = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(texts.documents) == len(items) >= 16
    for document, item in zip(texts.documents, items, strict=True):
        prompt, answer = document.prompt_ids, document.completion_ids
        assert prompt[0] == tokenizer.bos_token_id
        assert tokenizer.decode(prompt[1:]) == f"Question: {item['question'].strip()}\nAnswer:"
        assert tokenizer.decode(answer[:-1]) == f" {item['answer']}"
        assert answer[-1] == tokenizer.eos_token_id


def test_prompts_as_they_stand(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Without a template, and without a completion; blank lines do not count."""
    (tmp_path / "a.jsonl").write_text('{"prompt": "One"}\n\n{"prompt": "Two", "completion": " three"}\n')
    one, two = read_texts(tmp_path / "a.jsonl", tmp_path, tokenizer).documents
    assert tokenizer.decode(one.prompt_ids[1:]) == "One"
    assert one.completion_ids == (tokenizer.eos_token_id,)
    assert tokenizer.decode(two.completion_ids[:-1]) == " three"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "Line 2 of .* is not JSON"),
        ("[]", 'Line 2 of .* has no text "question" or "prompt"'),
        ('{"text": "a"}', "has no text"),
        ('{"prompt": ""}', "has no text"),
        ('{"question": 3}', "has no text"),
        ('{"prompt": "a", "completion": 3}', "has no text"),
    ],
)
def test_T36_faulty_lines(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, line: str, words: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "One"}\n' + line)
    with pytest.raises(ValueError, match=words):
        read_texts(tmp_path / "a.jsonl", tmp_path, tokenizer)


def test_random_texts_avoid_what_ends_a_text() -> None:
    texts = random_texts(20, (1, 7))
    tokens = {token for one in texts.documents for token in (*one.prompt_ids, *one.completion_ids)}
    assert tokens == set(range(20)) - {1, 7}
    assert texts == random_texts(20, (1, 7))


def test_a_checkpoint_is_known_by_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "a.safetensors").write_bytes(b"abc")
    (tmp_path / "tokenizer.json").write_text("1")
    known = checkpoint_hash(tmp_path)
    (tmp_path / "tokenizer.json").write_text("2")
    assert checkpoint_hash(tmp_path) == known
    changes: list[Any] = [
        lambda: (tmp_path / "a.safetensors").write_bytes(b"abd"),
        lambda: (tmp_path / "config.json").write_text("{ }"),
        lambda: (tmp_path / "b.safetensors").write_bytes(b""),
    ]
    seen = {known}
    for change in changes:
        change()
        seen.add(checkpoint_hash(tmp_path))
    assert len(seen) == 4


def test_no_folder_of_this_machine_is_told() -> None:
    assert command_line(["/some/where/compressed-spec", "bench", "demo"]) == ["compressed-spec", "bench", "demo"]


def test_peak_memory_is_in_bytes() -> None:
    """Linux says the same elsewhere, in kB; a Python with torch in it holds more than 64 MiB anywhere."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    said = [1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
    assert peak_memory() > 2**26
    assert all(peak_memory() == pytest.approx(size, rel=0.05) for size in said)
