"""What cannot be done exactly is refused, before anything is written, with the remedy."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from compressed_spec import TokenTree, generate, load_model
from compressed_spec.decode import Decoder, Request
from compressed_spec.models.deepseek_v4.names import DraftHeadKind
from compressed_spec.sampling_params import SamplingParams
from compressed_spec.testing import RandomDrafter, Reference, prefilled, random_model, raw_bytes
from compressed_spec.tree import TreeShape, parse_tree
from compressed_spec.verifying import make_verifier


@pytest.mark.parametrize(
    ("trees", "rows", "message"),
    [
        ([TokenTree.chain(range(9))], None, "make it with a larger max_nodes"),
        ([TokenTree.chain(range(5))] * 2, None, "10 nodes, more than the cache's 8"),
        ([TokenTree.chain([48])], None, "Token id 48 is out of range"),
        ([TokenTree.chain([0, -1])], None, "Token id -1 is out of range"),
        ([TokenTree.chain(range(8))], [1], "max_length above 20"),
        ([], None, "at least one"),
        ([TokenTree.chain([0])], [0, 1], "got 1 trees, 2 rows"),
        ([TokenTree.chain([0])], [2], "lie in 0 .. 1"),
        ([TokenTree.chain([0])], [-1], "lie in 0 .. 1"),
        ([TokenTree.chain([0])] * 2, [1, 1], "must be different"),
        ([TokenTree.chain([0])] * 3, None, "lie in 0 .. 1"),
    ],
)
def test_T36_verify(
    mixed: Reference, text: list[int], trees: list[TokenTree], rows: list[int] | None, message: str
) -> None:
    cache = prefilled(mixed.model, [text[:9], text[:13]], max_length=20, max_nodes=8)
    before = [raw_bytes(cache, row) for row in range(2)]
    with pytest.raises(ValueError, match=re.escape(message)):
        mixed.model.verify(cache, trees, rows=rows)
    assert [raw_bytes(cache, row) for row in range(2)] == before


@pytest.mark.parametrize(
    ("prompts", "rows", "message"),
    [
        ([], None, "at least one"),
        ([[]], None, "give at least one token id"),
        ([[3], []], None, "give at least one token id"),
        ([[3], [48]], None, "Token id 48 is out of range"),
        ([[3] * 12], None, "max_length above 20"),
        ([[3]], [0, 1], "got 2 rows for 1 prompts"),
        ([[3], [3]], [1, 1], "must be different"),
        ([[3]], [2], "lie in 0 .. 1"),
    ],
)
def test_T36_prefill(
    mixed: Reference, text: list[int], prompts: list[list[int]], rows: list[int] | None, message: str
) -> None:
    cache = prefilled(mixed.model, [text[:9], text[:13]], max_length=20)
    before = [raw_bytes(cache, row) for row in range(2)]
    with pytest.raises(ValueError, match=re.escape(message)):
        mixed.model.prefill(cache, prompts, rows=rows)
    assert cache.lengths == (9, 13)
    assert [raw_bytes(cache, row) for row in range(2)] == before


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([], [], "at least a root, got 0 tokens"),
        ([1, 2], [-1], "one parent a token"),
        ([1], [0], "must be -1 for the root"),
        ([1, 2], [-1, -1], "an earlier node for every other, got [-1, -1]"),
        ([1, 2, 3], [-1, 2, 0], "an earlier node for every other"),
        ([1, 2], [-1, 1], "an earlier node for every other"),
        ([1, 2.5], [-1, 0], "must be lists of ints"),
        (["1"], [-1], "must be lists of ints"),
        (None, [-1], "must be lists of ints"),
    ],
)
def test_T36_trees(tokens: Any, parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        TokenTree(tokens=tokens, parents=parents)


def test_tokens_of_a_tree_may_be_any_integers() -> None:
    tree = TokenTree(tokens=torch.tensor([4, 5]), parents=np.array([-1, 0]))  # type: ignore[arg-type]
    assert tree == TokenTree(tokens=[4, 5], parents=[-1, 0])


def test_T36_cache_sizes(mixed: Reference) -> None:
    with pytest.raises(ValueError, match="beyond the model's 4096 positions"):
        mixed.model.new_cache(max_length=4097)
    makers: dict[str, Callable[[int], object]] = {
        "batch_size": lambda n: mixed.model.new_cache(batch_size=n),
        "max_length": lambda n: mixed.model.new_cache(max_length=n),
        "max_nodes": lambda n: mixed.model.new_cache(max_nodes=n),
        "prefill_chunk": lambda n: mixed.model.new_cache(prefill_chunk=n),
        "max_draft_nodes": lambda n: mixed.model.new_cache(max_draft_nodes=n),
    }
    for name, make in makers.items():
        with pytest.raises(ValueError, match=f"needs {name} of at least 1, got 0"):
            make(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": "s3_k1_d5"}, "write s3_k1_d4"),
        ({"tree": "s1_k2_d9"}, "change d"),
        ({"tree": "wide"}, "Unknown tree"),
        ({"drafter": "eagle"}, "Unknown drafter"),
        ({"drafter": object()}, "needs start, propose, observe and release"),
        ({"verifier": "typical"}, "Unknown verifier"),
        ({"verifier": "leviathan", "drafter": "ngram", "temperature": 1.0}, "use 'coupled' or 'target'"),
        ({"verifier": "leviathan", "drafter": "mtp", "temperature": 1.0}, "takes chains only"),
        ({"max_new_tokens": 0}, "at least 1"),
        ({"batch_size": 0}, "at least 1"),
        ({"stop_token_ids": [48]}, "Token id 48 is out of range"),
        ({"seed": [1, 2]}, "2 seeds for 1 prompts"),
        ({"max_new_tokens": 4096}, "beyond the model's 4096 positions"),
    ],
)
def test_T36_generate(mixed: Reference, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(mixed.model, [[5, 6, 5, 6, 5]], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        (DraftHeadKind.NONE, "mtp", "has no MTP head: use drafter='ngram'"),
        (DraftHeadKind.NONE, "dspark", "has no DSpark head: use drafter='ngram'"),
        (DraftHeadKind.DSPARK, "mtp", "has no MTP head: use drafter='dspark'"),
        (DraftHeadKind.MTP, "dspark", "has no DSpark head: use drafter='mtp'"),
    ],
)
def test_T36_a_head_that_is_not_there(kind: DraftHeadKind, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(random_model((0, 4), draft_head=kind), [[5]], drafter=name)


def test_T36_a_cache_larger_than_the_memory(mixed: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*size: object, **options: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "full", full)
    with pytest.raises(
        ValueError, match=r"A cache of \d+ bytes does not fit into the memory of 'cpu': lower batch_size"
    ):
        mixed.model.new_cache()


def test_T36_numerics_and_dtypes_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="exact"):
        load_model("nowhere", numerics="exact")
    with pytest.raises(ValueError, match="float8"):
        load_model("nowhere", dtype="float8")


def test_T36_a_shape_that_does_not_fit_the_cache(mixed: Reference) -> None:
    cache = mixed.model.new_cache(max_length=20, max_nodes=4)

    def decoder(shape: TreeShape | None) -> Decoder:
        return Decoder(mixed.model, cache, drafter=RandomDrafter(48), shape=shape, verifier=make_verifier("coupled"))

    with pytest.raises(ValueError, match="max_nodes of at least that"):
        decoder(parse_tree("s3_k2_d6"))
    request = Request(prompt_ids=(1, 2, 3), params=SamplingParams(), max_new_tokens=19, stop_token_ids=frozenset())
    with pytest.raises(ValueError, match="shorten one of them"):
        decoder(parse_tree("s3_k1_d4")).submit(request)


def test_T36_no_row_will_ever_be_free(mixed: Reference, text: list[int]) -> None:
    """Rows that somebody else has filled are not taken; with none left, waiting would never end."""
    cache = prefilled(mixed.model, [text[:4]])
    decoder = Decoder(mixed.model, cache, drafter=None, shape=None, verifier=make_verifier("coupled"))
    decoder.submit(Request(prompt_ids=(1,), params=SamplingParams(), max_new_tokens=2, stop_token_ids=frozenset()))
    with pytest.raises(ValueError, match="release one"):
        decoder.step()
    cache.release(0)
    assert [[len(chunk.token_ids) for chunk in decoder.step()] for _ in range(2)] == [[1], [1]]
