"""Drafters by name and by import path."""

from pathlib import Path

import pytest

from compressed_spec import generate
from compressed_spec.drafting import NgramDrafter, SuffixDrafter, make_drafter
from compressed_spec.testing import MarkovModel, cycle

MODULE = """
from compressed_spec.drafting import NgramDrafter

class WithModel(NgramDrafter):
    def __init__(self, model):
        super().__init__()
        self.vocab_size = model.vocab_size

class Plain(NgramDrafter):
    def __init__(self, max_ngram=3):
        super().__init__(max_ngram)

class Optional(NgramDrafter):
    def __init__(self, model=None):
        super().__init__()
        self.vocab_size = model.vocab_size

class NoDrafter:
    def start(self, row, token_ids): ...

class Broken(NgramDrafter):
    def __init__(self):
        raise KeyError("its own fault")

class Greedy(NgramDrafter):
    def __init__(self, model, other):
        super().__init__()

number = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_drafters").mkdir()
    (tmp_path / "own_drafters" / "inner.py").write_text(MODULE)
    (tmp_path / "own_drafter_broken.py").write_text("import a_package_that_is_not_there")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def model() -> MarkovModel:
    return MarkovModel(cycle(12), cycle(12))


@pytest.mark.parametrize("separator", [":", "."])
@pytest.mark.parametrize("name", ["WithModel", "Plain", "Optional"])
def test_import_path(model: MarkovModel, name: str, separator: str) -> None:
    drafter = make_drafter(f"own_drafters.inner{separator}{name}", model)
    assert type(drafter).__name__ == name
    assert isinstance(drafter, NgramDrafter)
    assert getattr(drafter, "vocab_size", 12) == 12


def test_import_path_decodes(model: MarkovModel) -> None:
    outs = generate(model, [[0]], drafter="own_drafters.inner:WithModel", max_new_tokens=30)
    assert outs[0].token_ids == [(i + 1) % 12 for i in range(30)]
    assert outs[0].stats.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("own_drafters.inner:Missing", "has no class Missing"),
        ("own_drafters.inner:number", "has no class number"),
        ("own_drafters.inner:NoDrafter", "lacks some"),
        ("own_drafters.inner:Broken", "its own fault"),
        ("own_drafters.inner:Greedy", "cannot be made"),
        ("own_drafters.nowhere:X", "PYTHONPATH"),
        ("own_drafter_broken:X", "a_package_that_is_not_there"),
        ("own_drafters.inner:", "no import path"),
        (":X", "no import path"),
        (".X", "no import path"),
        ("eagle", "import path"),
    ],
)
def test_refused(model: MarkovModel, path: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        make_drafter(path, model)
    assert path in str(caught.value)


def test_suffix_by_name(model: MarkovModel) -> None:
    assert isinstance(make_drafter("suffix", model), SuffixDrafter)
