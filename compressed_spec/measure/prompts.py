"""Prompts of one length, for timings: a problem to continue, and before it as much other text as it takes."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from transformers import PreTrainedTokenizerBase

BUNDLED = Path(str(files("compressed_spec"))) / "assets" / "bench" / "problems.jsonl"
TEMPLATE = "prompt_template.txt"  # in a checkpoint's folder: how a question is put to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A prompt's ids, and those of what may follow it (with its end), which make it text for another prompt."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Documents to take prompts from."""

    documents: tuple[Document, ...]

    def prompts(self, first: int, count: int, length: int) -> list[list[int]]:
        """`count` prompts of exactly `length` tokens from document `first` on, cyclically.

        Each ends with its own document's prompt; before it stand other documents, completed. Whatever is too long is
        cut at its beginning.
        """
        return [self._prompt((first + i) % len(self.documents), length) for i in range(count)]

    def _prompt(self, index: int, length: int) -> list[int]:
        ids = list(self.documents[index].prompt_ids)
        other = index
        while len(ids) < length:
            other = (other + 1) % len(self.documents)
            document = self.documents[other]
            ids = [*document.prompt_ids, *(document.completion_ids if other != index else ()), *ids]
        return ids[-length:]


def read_texts(path: Path, folder: Path, tokenizer: PreTrainedTokenizerBase) -> Texts:
    """Documents of a JSONL file: objects with "question" or "prompt", and perhaps "answer" or "completion".

    folder: the checkpoint's. A question is put into its prompt template, where it has one; a prompt stands as it is.
    Raises ValueError for a file that cannot be read, or a line that is no such object.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The prompts in {path} cannot be read ({error}): name a JSONL file.") from error
    template = "{question}"
    if (folder / TEMPLATE).is_file():
        template = (folder / TEMPLATE).read_text(encoding="utf-8")
    documents = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        prompt, completion = _read_line(line, f"Line {number} of {path}", template)
        ids: list[int] = tokenizer(prompt, verbose=False)["input_ids"]
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        answer = tokenizer(completion, add_special_tokens=False, verbose=False)["input_ids"] if completion else []
        documents.append(Document(prompt_ids=tuple(ids), completion_ids=(*answer, *end)))
    return Texts(documents=tuple(documents))


def _read_line(line: str, where: str, template: str) -> tuple[str, str]:
    try:
        item = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON ({error}): write one object a line.") from error
    texts = item if isinstance(item, dict) else {}
    prompt, answer = texts.get("prompt"), texts.get("completion", texts.get("answer", ""))
    if "question" in texts:
        question, answer = texts["question"], f" {answer}".rstrip()
        prompt = template.replace("{question}", question.strip()) if isinstance(question, str) else None
    if not isinstance(prompt, str) or not prompt or not isinstance(answer, str):
        raise ValueError(f'{where} has no text "question" or "prompt": write {{"question": "...", "answer": "..."}}.')
    return prompt, answer


def random_texts(vocab_size: int, avoid: Sequence[int], *, count: int = 16, seed: int = 0) -> Texts:
    """Documents of random tokens, for a checkpoint without a tokenizer. avoid: tokens that none holds."""
    random_ids = random.Random(seed)
    tokens = [token for token in range(vocab_size) if token not in avoid]
    return Texts(
        documents=tuple(
            Document(
                prompt_ids=tuple(random_ids.choices(tokens, k=48)),
                completion_ids=tuple(random_ids.choices(tokens, k=80)),
            )
            for _ in range(count)
        )
    )
