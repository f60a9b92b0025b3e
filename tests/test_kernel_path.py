"""A model whose layers and commits run as kernels is the plain one: tokens, logits, state; and how it is chosen."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from compressed_spec import generate, load_model
from compressed_spec.models.deepseek_v4.kernel_path import KernelPath
from compressed_spec.models.deepseek_v4.layer_ops import LayerOps, torch_ops, triton_ops
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.names import DraftHeadKind
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint
from compressed_spec.testing.models import prefilled, random_model, random_text
from compressed_spec.testing.state import assert_near, assert_same_state, live_state
from compressed_spec.tree import TokenTree

needs_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="the tensors here are on the CPU")
TREES = [
    TokenTree(tokens=[3, 4, 5, 6, 7, 8], parents=[-1, 0, 0, 1, 1, 3]),
    TokenTree(tokens=[9], parents=[-1]),
    TokenTree(tokens=[1, 2, 3, 4, 5], parents=[-1, 0, 1, 2, 3]),
]
PATHS = [[0, 1, 3], [0], [0, 1, 2, 3]]


def on_kernels(model: DeepseekV4, ops: LayerOps) -> DeepseekV4:
    """A second model of the same weights."""
    other = deepcopy(model)
    other.path = KernelPath(other, ops)
    return other


def texts(model: DeepseekV4, prompts: Sequence[Sequence[int]], tree: str, **options: object) -> list[list[int]]:
    results = generate(model, prompts, tree=tree, stop_token_ids=[], **options)  # type: ignore[arg-type]
    return [result.token_ids for result in results]


def check_state(plain: DeepseekV4, kernels: DeepseekV4, lengths: Sequence[int]) -> None:
    """Prefill, a ragged verify, its commit, and another: everything agrees."""
    prompts = [random_text(n, seed=n) for n in lengths]
    ours, theirs = (prefilled(model, prompts, max_length=64) for model in (kernels, plain))
    for _ in range(2):
        actual, expected = kernels.verify(ours, TREES), plain.verify(theirs, TREES)
        assert_near(actual.logits, expected.logits, "logits")
        ours.commit(actual, PATHS)
        theirs.commit(expected, PATHS)
        assert ours.lengths == theirs.lengths
        for row in range(3):
            assert_same_state(live_state(ours, row), live_state(theirs, row), f"row {row}")


@pytest.mark.parametrize(
    "head", [DraftHeadKind.MTP, DraftHeadKind.DSPARK, pytest.param(DraftHeadKind.NONE, marks=pytest.mark.slow)]
)
def test_state_and_logits(head: DraftHeadKind) -> None:
    plain = random_model(draft_head=head, num_draft_layers=2 if head is DraftHeadKind.DSPARK else 1)
    check_state(plain, on_kernels(plain, torch_ops()), (15, 3, 30))


@pytest.mark.parametrize(
    ("tree", "drafter"),
    [
        ("s2_k2_d5", "early-exit"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("off", "ngram"), ("s3_k1_d4", "mtp"), ("s3_k2_d6", "mtp"))
        ),
    ],
)
def test_texts(tree: str, drafter: str) -> None:
    plain = random_model((0, 4, 8, 4))
    prompts = [random_text(n, seed=n) for n in (15, 1, 30)]
    kernels = on_kernels(plain, torch_ops())
    for options in ({}, {"temperature": 0.8, "top_p": 0.9}):
        expected = texts(plain, prompts, "off", max_new_tokens=9, batch_size=2, **options)
        assert texts(kernels, prompts, tree, drafter=drafter, max_new_tokens=9, batch_size=2, **options) == expected


@needs_interpreter
def test_state_and_logits_in_triton() -> None:
    """Layer 0 is hash-routed CSA whose indexer chooses, layer 1 HCA; index heads are many, so that no scores tie."""
    plain = random_model((4, 8), dtype=torch.float32)
    check_state(plain, on_kernels(plain, triton_ops()), (14, 1, 6))


@pytest.mark.slow
@needs_interpreter
@pytest.mark.parametrize("tree", ["off", "s3_k1_d4", "s3_k2_d6"])
def test_texts_in_triton(tree: str) -> None:
    plain = random_model((0, 4, 8, 4), dtype=torch.float32)
    prompts = [random_text(n, seed=n) for n in (15, 1, 30)]
    for options in ({}, {"temperature": 0.8}):
        expected = texts(plain, prompts, "off", max_new_tokens=9, batch_size=2, **options)
        assert (
            texts(on_kernels(plain, triton_ops()), prompts, tree, max_new_tokens=9, batch_size=2, **options) == expected
        )


@pytest.mark.slow
@needs_interpreter
@pytest.mark.parametrize("keep_quantized", [False, True])
def test_a_loaded_checkpoint_in_triton(keep_quantized: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    folder = make_tiny_checkpoint(tmp_path)
    plain = load_model(folder, progress=False, keep_quantized=keep_quantized)
    kernels = load_model(folder, progress=False, keep_quantized=keep_quantized, kernels="triton")
    prompts = [random_text(n, seed=n) for n in (9, 2)]
    expected = texts(plain, prompts, "off", max_new_tokens=5)
    assert texts(kernels, prompts, "s2_k2_d4", max_new_tokens=5) == expected


def test_a_commit_after_a_copy_moves_the_copys_rows() -> None:
    """Pools are known to the kernel by address, which a copy of a cache does not share."""
    model = on_kernels(random_model((4,), dtype=torch.float32), torch_ops())
    cache = prefilled(model, [random_text(4)])
    other = deepcopy(cache)
    before = live_state(cache)
    other.commit(model.verify(other, [TokenTree.chain([5])]), [[0]])
    assert_same_state(live_state(cache), before, "the original")
    model.path = None
    plain = prefilled(model, [[*random_text(4), 5]])
    assert_same_state(live_state(other), live_state(plain), "the copy")


def test_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_checkpoint(tmp_path)
    assert load_model(folder, progress=False).path is None
    with pytest.raises(ValueError, match="Unknown kernels 'cuda'"):
        load_model(folder, kernels="cuda")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert load_model(folder, kernels="triton", progress=False).path is not None
    with pytest.raises(ValueError, match="kernels='triton' computes in float32"):
        load_model(folder, kernels="triton", dtype="float64")
    with pytest.raises(ValueError, match="kernels='triton' computes in float32"):
        load_model(folder, kernels="triton", numerics="invariant")
    with pytest.raises(ValueError, match="compile=True"):
        load_model(folder, kernels="triton", compile=True)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="needs a GPU"):
        load_model(folder, kernels="triton")
