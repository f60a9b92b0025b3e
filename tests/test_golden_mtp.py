"""T23: the model and its MTP head against the outputs of DeepSeek's own inference code (tests/data/golden_mtp).

T = nodes, V = vocabulary, N = draft nodes, M = residual streams, D = model width
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from compressed_spec import TokenTree, load_model
from compressed_spec.cache import Cache, Scratch
from compressed_spec.drafting import DraftRequest, MTPDrafter
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.target import DraftStep, StepDraft
from compressed_spec.testing.ways import WAYS, Way, after_rejected_rounds, along_trees
from compressed_spec.tree import parse_tree

FOLDER = Path(__file__).parent / "data" / "golden_mtp"
GOLDEN: dict[str, Any] = json.loads((FOLDER / "golden.json").read_text())
LENGTHS = sorted(map(int, GOLDEN))
TOLERANCE = 2e-4  # absolute, on logits of size 10
NORM_TOLERANCE = 1e-5  # relative; the recorded norms have 8 digits


@pytest.fixture(scope="module")
def model() -> DeepseekV4:
    return load_model(FOLDER, progress=False)


@pytest.fixture
def steps(model: DeepseekV4, monkeypatch: pytest.MonkeyPatch) -> list[StepDraft]:
    """Fills with the head's steps as a drafter makes them."""
    seen: list[StepDraft] = []
    draft_step = model.draft_step

    def record(step: DraftStep, scratch: Scratch) -> StepDraft:
        seen.append(draft_step(step, scratch))
        return seen[-1]

    monkeypatch.setattr(model, "draft_step", record)
    return seen


def propose(model: DeepseekV4, cache: Cache, rows: Sequence[int], roots: Sequence[int], tree: str) -> list[TokenTree]:
    shape = parse_tree(tree)
    assert shape is not None
    request = DraftRequest(
        cache=cache,
        rows=tuple(rows),
        roots=tuple(roots),
        shape=shape,
        max_depths=(shape.num_steps,) * len(rows),
        temperatures=(0.0,) * len(rows),
        noise=None,
    )
    return list(MTPDrafter(model).propose(request))


def assert_target(logits_V: torch.Tensor, length: int) -> None:
    golden = GOLDEN[str(length)]
    torch.testing.assert_close(logits_V, torch.tensor(golden["target_logits"]), atol=TOLERANCE, rtol=0)
    assert int(logits_V.argmax()) == golden["root"]


def assert_chain(steps: Sequence[StepDraft], node: int, length: int) -> None:
    """The three chained steps of the head, at this place among a step's nodes."""
    chain = GOLDEN[str(length)]["mtp_chain"]
    assert len(steps) == len(chain) == 3
    for step, golden in zip(steps, chain, strict=True):
        torch.testing.assert_close(step.logits_NV[node], torch.tensor(golden["logits"]), atol=TOLERANCE, rtol=0)
        assert int(step.logits_NV[node].argmax()) == golden["argmax"]
        assert step.streams_NMD[node].norm().item() == pytest.approx(golden["stream_norm"], rel=NORM_TOLERANCE)


def chain_tokens(length: int) -> tuple[int, ...]:
    golden = GOLDEN[str(length)]
    assert [step["token_in"] for step in golden["mtp_chain"]] == [golden["root"], *chain_argmaxes(length)[:-1]]
    return (golden["root"], *chain_argmaxes(length))


def chain_argmaxes(length: int) -> list[int]:
    return [step["argmax"] for step in GOLDEN[str(length)]["mtp_chain"]]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: str(way.__name__))
def test_T23_target_and_head_equal_the_reference(
    model: DeepseekV4, steps: list[StepDraft], way: Way, length: int
) -> None:
    cache = model.new_cache(max_length=320, prefill_chunk=37)
    golden = GOLDEN[str(length)]
    assert_target(way(model, cache, 0, golden["prompt"]), length)
    for _ in range(2):  # drafting leaves nothing behind: a second draft is the same
        steps.clear()
        (tree,) = propose(model, cache, [0], [golden["root"]], "s3_k1_d4")
        assert_chain(steps, 0, length)
        assert tree.tokens == chain_tokens(length)
    cache.check_integrity()


@pytest.mark.parametrize("way", [after_rejected_rounds, along_trees], ids=lambda way: str(way.__name__))
def test_T23_head_in_a_batch_with_every_row_active(model: DeepseekV4, steps: list[StepDraft], way: Way) -> None:
    rows = [3, 0, 4, 2]  # row 1 stays free
    cache = model.new_cache(batch_size=5, max_length=320, prefill_chunk=64)
    for row, length in zip(rows, LENGTHS, strict=True):
        assert_target(way(model, cache, row, GOLDEN[str(length)]["prompt"]), length)
    trees = propose(model, cache, rows, [GOLDEN[str(length)]["root"] for length in LENGTHS], "s3_k1_d4")
    for node, length in enumerate(LENGTHS):
        assert_chain(steps, node, length)
        assert trees[node].tokens == chain_tokens(length)


def test_T23_prefill_of_all_prompts_together(model: DeepseekV4, steps: list[StepDraft]) -> None:
    cache = model.new_cache(batch_size=4, max_length=320, prefill_chunk=50)
    logits_BV = model.prefill(cache, [GOLDEN[str(length)]["prompt"] for length in LENGTHS])
    propose(model, cache, range(4), [GOLDEN[str(length)]["root"] for length in LENGTHS], "s3_k1_d4")
    for row, length in enumerate(LENGTHS):
        assert_target(logits_BV[row], length)
        assert_chain(steps, row, length)


@pytest.mark.parametrize("length", LENGTHS)
def test_T23_best_path_of_a_drafted_tree_is_the_chain(model: DeepseekV4, length: int) -> None:
    """Beside siblings, every node of the greedy path is still drafted from its own streams and rows."""
    cache = model.new_cache(max_length=320)
    golden = GOLDEN[str(length)]
    model.prefill(cache, [golden["prompt"]])
    (tree,) = propose(model, cache, [0], [golden["root"]], "s3_k3_d22")
    node = 0
    for token in chain_argmaxes(length):
        children = tree.children(node)
        assert token in [tree.tokens[child] for child in children]
        node = next(child for child in children if tree.tokens[child] == token)


def test_T23_float64_agrees_as_well() -> None:
    wide = load_model(FOLDER, dtype="float64", progress=False)
    cache = wide.new_cache(batch_size=4, max_length=320)
    logits_BV = wide.prefill(cache, [GOLDEN[str(length)]["prompt"] for length in LENGTHS])
    assert logits_BV.dtype == torch.float64
    for row, length in enumerate(LENGTHS):
        assert_target(logits_BV[row].float(), length)
