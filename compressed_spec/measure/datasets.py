"""Prompts to measure with: excerpts that ship with the package, the user's files, and data sets of the hub."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.resources import files
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

BUNDLED = Path(str(files("compressed_spec"))) / "assets" / "prompts"
HUB = "hub"
_MBPP_TEST = range(11, 511)


class Task(Enum):
    """What a data set asks for, hence which template its prompts take and how answers are judged."""

    MATH = "math"
    CODE = "code"
    CHAT = "chat"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """A user's words. answer: the reference that an exact match is held against; category: the data set's own."""

    id: str
    text: str
    category: str | None = None
    answer: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """Prompts under the name by which the user asked for them."""

    name: str
    task: Task
    prompts: tuple[Prompt, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _HubFile:
    repo_id: str
    filename: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    task: Task
    read: Callable[[Sequence[Mapping[str, Any]]], list[Prompt]]
    hub: _HubFile | None = None


def read_dataset(name: str, count: int) -> Dataset:
    """The first `count` prompts of `gsm8k`, `mbpp` or `spec_bench` (bundled, 64 each; with `:FILE` the original file,
    with `:hub` the hub's test part), of `sharegpt:FILE`, or of a file of prompts.

    A file of prompts has a JSON string or an object with "prompt" (and "id", "category", if it likes) in every line.
    Spec-Bench's categories take turns. Of conversations, the first user's turn is the prompt.
    Raises ValueError for an unknown name, a file that is not what it should be, or fewer prompts than `count`.
    """
    kind, _, where = name.partition(":")
    if kind == "sharegpt":
        if not where:
            raise ValueError("Name ShareGPT's file: sharegpt:FILE. None of it ships with this package.")
        prompts, task = _checked(name, _sharegpt, _json_array(Path(where))), Task.CHAT
    elif kind in SOURCES:
        source = SOURCES[kind]
        prompts, task = _checked(name, source.read, _items(kind, where, source)), source.task
    elif Path(name).is_file():
        prompts, task = _checked(name, _plain, _json_lines(Path(name))), Task.CHAT
    else:
        raise ValueError(
            f"Unknown dataset {name!r}: use {', '.join(SOURCES)} (NAME:FILE for the whole of it), sharegpt:FILE, or a "
            "file with one prompt a line, as a JSON string or object."
        )
    if len(prompts) < count:
        more = f" or name the original file, {kind}:FILE" if kind in SOURCES and not where else ""
        raise ValueError(f"{name} has {len(prompts)} prompts, not {count}: lower --requests{more}.")
    return Dataset(name=name, task=task, prompts=tuple(prompts[:count]))


def _gsm8k(items: Sequence[Mapping[str, Any]]) -> list[Prompt]:
    return [
        Prompt(id=str(number), text=item["question"].strip(), answer=item["answer"])
        for number, item in enumerate(items)
    ]


def _mbpp(items: Sequence[Mapping[str, Any]]) -> list[Prompt]:
    """The test part."""
    return [
        Prompt(id=str(item["task_id"]), text=item["text"].strip()) for item in items if item["task_id"] in _MBPP_TEST
    ]


def _spec_bench(items: Sequence[Mapping[str, Any]]) -> list[Prompt]:
    """Categories in turn, so that any number of prompts is a mixture."""
    by_category: dict[str, list[Prompt]] = {}
    for item in items:
        prompt = Prompt(id=str(item["question_id"]), text=item["turns"][0].strip(), category=item["category"])
        by_category.setdefault(item["category"], []).append(prompt)
    return [prompt for prompt in chain.from_iterable(zip_longest(*by_category.values())) if prompt is not None]


def _sharegpt(items: Sequence[Mapping[str, Any]]) -> list[Prompt]:
    prompts = []
    for item in items:
        turns = item["conversations"]
        if turns and turns[0]["from"] in ("human", "user") and turns[0]["value"].strip():
            prompts.append(Prompt(id=str(item["id"]), text=turns[0]["value"].strip()))
    return prompts


def _plain(items: Sequence[Mapping[str, Any]]) -> list[Prompt]:
    prompts = []
    for number, item in enumerate(items):
        fields = {"prompt": item} if isinstance(item, str) else item
        if not isinstance(fields["prompt"], str):
            raise TypeError('"prompt" is a string')
        name, category = fields.get("id", number), fields.get("category")
        prompts.append(
            Prompt(id=str(name), text=fields["prompt"], category=None if category is None else str(category))
        )
    return prompts


SOURCES: Mapping[str, _Source] = {
    "gsm8k": _Source(
        task=Task.MATH,
        read=_gsm8k,
        hub=_HubFile(repo_id="openai/gsm8k", filename="main/test-00000-of-00001.parquet"),
    ),
    "mbpp": _Source(
        task=Task.CODE,
        read=_mbpp,
        hub=_HubFile(repo_id="google-research-datasets/mbpp", filename="full/test-00000-of-00001.parquet"),
    ),
    "spec_bench": _Source(task=Task.CHAT, read=_spec_bench),
}


def _checked(
    name: str, read: Callable[[Sequence[Mapping[str, Any]]], list[Prompt]], items: Sequence[Mapping[str, Any]]
) -> list[Prompt]:
    try:
        return read(items)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{name} is not in its data set's format ({error!r}): check which file it is.") from error


def _items(kind: str, where: str, source: _Source) -> Sequence[Mapping[str, Any]]:
    if not where:
        return _json_lines(BUNDLED / f"{kind}.jsonl")
    if where != HUB:
        return _parquet(Path(where)) if where.endswith(".parquet") else _json_lines(Path(where))
    if source.hub is None:
        raise ValueError(f"{kind} is not on the hub: download its file of questions and give it as {kind}:FILE.")
    try:
        path = huggingface_hub.hf_hub_download(source.hub.repo_id, source.hub.filename, repo_type="dataset")
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"{source.hub.repo_id} cannot be had from the Hugging Face hub ({type(error).__name__}): check the "
            f"connection, or give its file as {kind}:FILE."
        ) from error
    return _parquet(Path(path))


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"The data file {path} cannot be read ({error.strerror}): check its name.") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"The data file {path} is not UTF-8 text: convert it.") from error


def _json_lines(path: Path) -> list[Any]:
    items = []
    for number, line in enumerate(_read(path).split("\n"), start=1):  # not splitlines: JSON may hold U+2028 as it is
        if line.strip():
            try:
                items.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"Line {number} of {path} is not JSON ({error}): correct it.") from error
    return items


def _json_array(path: Path) -> list[Any]:
    try:
        items = json.loads(_read(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}): download it again.") from error
    if not isinstance(items, list):
        raise ValueError(f"{path} holds no list of conversations: check which file it is.")
    return items


def _parquet(path: Path) -> list[Any]:
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError as error:
        raise ValueError(
            "Reading a data set's parquet file needs pyarrow: pip install compressed-spec[sweep]."
        ) from error
    try:
        items: list[Any] = parquet.read_table(path).to_pylist()
    except (OSError, ArrowInvalid) as error:
        raise ValueError(f"The data file {path} cannot be read ({error}): check it.") from error
    return items
