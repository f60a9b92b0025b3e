"""The demo's last phase: short runs over half corpus and half own texts, which teach it not to repeat itself.

Each run's texts are written by the checkpoint that the run before it left, quantised as it is shipped, since a model
that has unlearnt some loops finds others.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from compressed_spec.training.corpus import Encoded
from compressed_spec.training.gate import ANSWER_TOKENS
from compressed_spec.training.own_texts import write_own_texts
from compressed_spec.training.recipe import Recipe

TEXTS_FILE = "own_texts.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Polishing:
    """Run `number` (1, 2, ...), which begins with the checkpoint in `folder`, on `num_texts` answers of its own.

    earlier: work folders of the runs before it, whose repetitions are shown again, lest they come back.
    """

    number: int
    folder: Path
    num_texts: int
    earlier: tuple[Path, ...]


def polishing_documents(
    documents: Sequence[Encoded], recipe: Recipe, polishing: Polishing, work: Path, *, processes: int, compile: bool
) -> list[Encoded]:
    """As many documents of the corpus as new own texts. `work` keeps these, so that they are written once."""
    choose = random.Random(recipe.seed * 1_000_003 + polishing.number)
    asked = choose.sample([d for d in documents if d.prompt_length > 1], polishing.num_texts)
    told = choose.sample(list(documents), polishing.num_texts)
    own = _own_texts(work / TEXTS_FILE, polishing.folder, asked, processes=processes, compile=compile)
    old = [text for folder in polishing.earlier for text in _read(folder / TEXTS_FILE) if text.repeated]
    return [*told, *own, *old]


def _own_texts(file: Path, folder: Path, asked: Sequence[Encoded], *, processes: int, compile: bool) -> list[Encoded]:
    if not file.exists():
        texts = write_own_texts(folder, asked, max_new_tokens=ANSWER_TOKENS, processes=processes, compile=compile)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(json.dumps([asdict(text) | {"repeated": sorted(text.repeated)} for text in texts]))
        part.replace(file)
    return _read(file)


def _read(file: Path) -> list[Encoded]:
    return [Encoded(**text | {"repeated": frozenset(text["repeated"])}) for text in json.loads(file.read_text())]
