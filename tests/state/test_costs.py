"""What a round costs in operations: lists once a round, copies once a kind, nothing where nothing was accepted."""

import importlib
from collections import Counter
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from compressed_spec import TokenTree
from compressed_spec.cache import Cache, Verification
from compressed_spec.target import TargetModel
from compressed_spec.testing import Reference, prefilled, random_model


class OpCounter(TorchDispatchMode):
    """Counts the tensor operations that run under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[str(func)] += 1
        return func(*args, **(kwargs or {}))


def ready(model: TargetModel, text: list[int]) -> tuple[Cache, Verification]:
    cache = prefilled(model, [text[:13], text[:6]])
    tree = TokenTree(tokens=text[:6], parents=[-1, 0, 0, 2, 3, 4])
    return cache, model.verify(cache, [tree, tree])


def test_a_commit_costs_the_same_whatever_the_number_of_layers(text: list[int]) -> None:
    counts = []
    for ratios in ((0, 4, 8) * 2, (0, 4, 8) * 5):
        cache, verify = ready(random_model(ratios), text)
        with OpCounter() as counter:
            cache.commit(verify, [[0, 2, 3, 4], [0, 2]])
        counts.append(counter.ops)
    assert counts[0] == counts[1]
    # One gather and one scatter a pool: window, head, stream, and for CSA and HCA their buffers and entries.
    copies = {name: count for name, count in counts[0].items() if "index" in name and "select" not in name}
    assert max(copies.values()) <= 3 + 4 + 2


def test_a_commit_of_nothing_touches_no_tensor(mixed: Reference, text: list[int]) -> None:
    cache, verify = ready(mixed.model, text)
    with OpCounter() as counter:
        cache.commit(verify, [[], []])
    assert counter.ops == Counter()


def test_entries_are_not_copied_where_no_window_closed(mixed: Reference, text: list[int]) -> None:
    """Position 13 closes nothing; 15 closes a CSA and an HCA window."""
    counts = []
    for length in (13, 15):
        cache = prefilled(mixed.model, [text[:length]])
        verify = mixed.model.verify(cache, [TokenTree(tokens=[5], parents=[-1])])
        with OpCounter() as counter:
            cache.commit(verify, [[0]])
        counts.append(sum(count for name, count in counter.ops.items() if "index_copy" in name))
    assert counts == [6, 9]


def test_lists_are_made_once_a_round(text: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """One plan a forward, and one rotation a RoPE base, whatever the number of layers."""
    calls: Counter[str] = Counter()
    for module, name in (
        ("compressed_spec.target", "make_plan"),
        ("compressed_spec.rows", "window_rows"),
        ("compressed_spec.rows", "locate"),
        ("compressed_spec.models.deepseek_v4.model", "rotation"),
    ):
        original = getattr(importlib.import_module(module), name)

        def counted(*args: Any, _original: Any = original, _name: str = name, **kwargs: Any) -> Any:
            calls[_name] += 1
            return _original(*args, **kwargs)

        monkeypatch.setattr(f"{module}.{name}", counted)
    counts = []
    for ratios in ((0, 4, 8), (0, 4, 8) * 3):
        model = random_model(ratios)
        cache = prefilled(model, [text[:13]])
        calls.clear()
        model.verify(cache, [TokenTree.chain(text[13:18])])
        counts.append(dict(calls))
    assert counts[0] == counts[1]
    assert counts[0]["make_plan"] == counts[0]["window_rows"] == 1
    assert counts[0]["locate"] == 3  # the window, and the windows that two compressions pool


def test_a_verify_costs_the_same_whatever_the_batch_holds(mixed: Reference, text: list[int]) -> None:
    """No operation runs once a node: 20 nodes cost what 5 cost, but for experts that more nodes reach."""
    counts = []
    for size in (5, 20):
        cache = prefilled(mixed.model, [text[:21]])
        with OpCounter() as counter:
            mixed.model.verify(cache, [TokenTree.chain(text[21 : 21 + size])])
        counts.append(sum(counter.ops.values()))
    per_expert = 30
    assert counts[1] - counts[0] <= 4 * per_expert * 4
    assert counts[1] < 1.3 * counts[0]
