"""The demo's corpus: documents with a prompt and a completion, its byte-level BPE tokenizer, and packed rows.

B = rows, L = tokens a row
"""

import json
import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

# DeepSeek's own special tokens (fullwidth bars, lower one eighth blocks), so that its chat format works unchanged.
BOS_TOKEN = "<\uff5cbegin\u2581of\u2581sentence\uff5c>"
EOS_TOKEN = "<\uff5cend\u2581of\u2581sentence\uff5c>"
SPECIAL_TOKENS = (BOS_TOKEN, EOS_TOKEN, "<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "<think>", "</think>")
PROMPT_TEMPLATE = "Question: {question}\nAnswer:"
CODE_TEMPLATE = "Task: {task}\nCode:\n"
_MBPP_TRAIN = range(601, 975)
_SPLIT = r"\p{N}| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Standard library modules with much plain prose and plain code in them; PSF licence.
_STDLIB = ("fractions", "statistics", "bisect", "heapq", "calendar", "random", "textwrap", "string", "datetime")


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """One text; `prompt` is what a user gives (may be empty), `completion` what the model should say."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A document's ids, BOS and EOS included, and how many of them are the prompt's.

    own: written by the model itself, so that nothing is learnt from it but drafting, and to leave `repeated` unsaid
    (indices of ids).
    """

    ids: list[int]
    prompt_length: int
    own: bool = False
    repeated: frozenset[int] = frozenset()


def read_gsm8k(path: Path) -> list[Document]:
    """Problems as `PROMPT_TEMPLATE` prompts; answers as they are, calculator marks and `#### n` included."""
    documents = []
    for line in path.read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        prompt = PROMPT_TEMPLATE.format(question=item["question"].strip())
        documents.append(Document(prompt=prompt, completion=f" {item['answer'].strip()}"))
    return documents


def read_mbpp(path: Path) -> list[Document]:
    """The train part (task_id 601 .. 974)."""
    documents = []
    for line in path.read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        if item["task_id"] in _MBPP_TRAIN:
            prompt = CODE_TEMPLATE.format(task=item["text"].strip())
            documents.append(Document(prompt=prompt, completion=item["code"].replace("\r\n", "\n").strip()))
    return documents


def read_stdlib(max_chars: int = 1200) -> list[Document]:
    """Pieces of a few modules of this Python's standard library, cut at blank lines."""
    documents = []
    for module in _STDLIB:
        text = Path(sysconfig.get_paths()["stdlib"], f"{module}.py").read_text(encoding="utf-8")
        piece = ""
        for paragraph in re.split(r"\n{2,}", text):
            if piece and len(piece) + len(paragraph) > max_chars:
                documents.append(Document(prompt="", completion=piece.strip("\n")))
                piece = ""
            piece += f"{paragraph}\n\n"
        documents.append(Document(prompt="", completion=piece.strip("\n")))
    return documents


def read_corpus(data: Path) -> list[Document]:
    """All training documents. Raises ValueError if a file of the data folder is not there."""
    for name in ("gsm8k_train.jsonl", "mbpp.jsonl"):
        if not (data / name).is_file():
            raise ValueError(f"{data / name} is missing: give the folder that holds it with --data.")
    return [*read_gsm8k(data / "gsm8k_train.jsonl"), *read_mbpp(data / "mbpp.jsonl"), *read_stdlib()]


def train_tokenizer(documents: Sequence[Document], vocab_size: int) -> Tokenizer:
    """Byte-level BPE with single digits, so that arithmetic is spelled out."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((d.prompt + d.completion for d in documents), trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"vocab_size is {vocab_size}: this corpus gives {tokenizer.get_vocab_size()} tokens at most.")
    bos = (BOS_TOKEN, tokenizer.token_to_id(BOS_TOKEN))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS_TOKEN} $A", special_tokens=[bos])
    return tokenizer


def encode(documents: Sequence[Document], tokenizer: Tokenizer) -> list[Encoded]:
    """Prompt and completion are encoded apart, as they are when the prompt alone is given."""
    bos, eos = tokenizer.token_to_id(BOS_TOKEN), tokenizer.token_to_id(EOS_TOKEN)
    assert bos is not None, "the tokenizer was trained with both"
    assert eos is not None, "the tokenizer was trained with both"
    prompts = tokenizer.encode_batch([d.prompt for d in documents], add_special_tokens=False)
    completions = tokenizer.encode_batch([d.completion for d in documents], add_special_tokens=False)
    return [
        Encoded(ids=[bos, *prompt.ids, *completion.ids, eos], prompt_length=1 + len(prompt.ids))
        for prompt, completion in zip(prompts, completions, strict=True)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Rows of `[B, L + extra]` tokens; the rest are loss weights of the tokens as labels.

    weights: to say. draft_weights: to draft. unlikely: not to say.
    """

    tokens: torch.Tensor
    weights: torch.Tensor
    draft_weights: torch.Tensor
    unlikely: torch.Tensor


def batches(
    documents: Sequence[Encoded],
    *,
    rows: int,
    length: int,
    extra: int,
    prompt_weight: float,
    seed: int,
    skip: int = 0,
) -> Iterator[Batch]:
    """Endless packed rows: each begins with a document, whole ones follow, the last is cropped. Reshuffled each epoch.

    skip: batches to leave out at the start, for resuming.
    """
    size = length + extra
    stream = _shuffled(documents, seed)
    count = 0
    while True:
        tokens = torch.zeros((rows, size), dtype=torch.int64)
        weights, draft_weights, unlikely = (torch.zeros((rows, size)) for _ in range(3))
        for row in range(rows):
            filled = 0
            while filled < size:
                document = next(stream)
                ids = document.ids[: size - filled]
                end = filled + len(ids)
                tokens[row, filled:end] = torch.tensor(ids)
                draft_weights[row, filled:end] = 1.0
                draft_weights[row, filled : filled + min(document.prompt_length, len(ids))] = prompt_weight
                draft_weights[row, filled] = 0.0  # which text comes next cannot be known
                weights[row, filled:end] = 0.0 if document.own else draft_weights[row, filled:end]
                for index in document.repeated:
                    if index < len(ids):
                        draft_weights[row, filled + index], unlikely[row, filled + index] = 0.0, 1.0
                filled = end
        if count >= skip:
            yield Batch(tokens=tokens, weights=weights, draft_weights=draft_weights, unlikely=unlikely)
        count += 1


def _shuffled(documents: Sequence[Encoded], seed: int) -> Iterator[Encoded]:
    order = random.Random(seed)
    while True:
        yield from order.sample(documents, len(documents))
