"""Snapshot, restore and fork: exact at every length, and nobody else's rows move."""

from copy import deepcopy
from dataclasses import replace

import pytest

from compressed_spec import TokenTree
from compressed_spec.layout import Addressing, pool_specs
from compressed_spec.testing import (
    Reference,
    assert_near,
    assert_same_state,
    live_state,
    prefilled,
    random_model,
    raw_bytes,
)

LENGTHS = range(1, 34)  # around every boundary of ratios 3, 4, 5 and 8 and of the window


def test_T17_restore_elsewhere_and_go_on(reference: Reference, text: list[int]) -> None:
    """Every length, into other rows of a cache of another shape; the copies then decode as one batch."""
    model = reference.model
    source = prefilled(model, [text[:n] for n in LENGTHS])
    snapshot = source.snapshot()
    assert snapshot.lengths == tuple(LENGTHS)
    target = model.new_cache(batch_size=35, max_length=57, max_nodes=35 * 5, prefill_chunk=3)
    model.prefill(target, [text[:20]], rows=[34])
    before = raw_bytes(target, 34), raw_bytes(target, 0)
    target.restore(snapshot, rows=[*range(33, 0, -1)])
    assert (raw_bytes(target, 34), raw_bytes(target, 0)) == before
    rows = [34 - n for n in LENGTHS]
    verify = model.verify(target, [TokenTree.chain(text[n : n + 5]) for n in LENGTHS], rows=rows)
    target.commit(verify, [range(5) for _ in LENGTHS])
    for i, n in enumerate(LENGTHS):
        for depth in range(5):
            expected = reference.after(text[: n + depth + 1])
            assert_near(verify.logits[5 * i + depth], expected.logits_V, f"{n} + {depth}")
        assert_same_state(live_state(target, rows[i]), live_state(expected.cache), f"restored at {n}")
    assert raw_bytes(target, 34) == before[0]


def test_T17_a_snapshot_is_a_copy(mixed: Reference, text: list[int]) -> None:
    """What the cache does afterwards does not reach it, and it can be restored again and again."""
    model = mixed.model
    cache = prefilled(model, [text[:13], text[:6]])
    snapshot = cache.snapshot([0])
    for _ in range(2):
        model.prefill(cache, [text[20:41]], rows=[0])
        other = raw_bytes(cache, 1)
        cache.restore(snapshot)
        assert cache.lengths == (13, 6)
        assert raw_bytes(cache, 1) == other
        assert_same_state(live_state(cache), live_state(mixed.after(text[:13]).cache), "restored")


def test_T17_fork_at_every_length(reference: Reference, text: list[int]) -> None:
    """A row and its copy go different ways; a third row stays as it was."""
    model = reference.model
    cache = model.new_cache(batch_size=3, max_length=60, max_nodes=8)
    model.prefill(cache, [text[40:59]], rows=[1])
    bystander = raw_bytes(cache, 1)
    for n in range(1, 26):
        model.prefill(cache, [text[n - 1 : n]], rows=[2])
        cache.fork(2, 0)
        assert cache.lengths == (n, 19, n)
        verify = model.verify(cache, [TokenTree.chain([7, 8, 9])], rows=[0])
        for depth in range(3):
            expected = reference.after([*text[:n], *[7, 8, 9][: depth + 1]]).logits_V
            assert_near(verify.logits[depth], expected, f"forked at {n}, depth {depth}")
        cache.commit(verify, [range(3)])
        assert raw_bytes(cache, 1) == bystander
    assert_same_state(live_state(cache, 2), live_state(reference.after(text[:25]).cache), "the source")
    assert_same_state(live_state(cache, 0), live_state(reference.after([*text[:25], 7, 8, 9]).cache), "the fork")


def test_T18_a_snapshot_counts_what_it_holds(reference: Reference, text: list[int]) -> None:
    model = reference.model
    cache = prefilled(model, [text[:n] for n in (3, 21)])
    snapshot = cache.snapshot()
    assert snapshot.lengths == (3, 21)
    expected = 0
    for pool in pool_specs(cache.spec, cache.shape.max_length):
        for n in snapshot.lengths:
            rows = pool.per_sequence
            if pool.addressing is Addressing.ENTRIES:
                assert pool.compression is not None
                rows = n // pool.compression.ratio
            expected += rows * pool.num_layers * pool.dim * pool.dtype.itemsize
    assert snapshot.nbytes == expected > 0
    assert cache.snapshot([1]).nbytes > cache.snapshot([0]).nbytes or not cache.spec.compressions
    assert cache.snapshot([]).nbytes == 0


@pytest.mark.parametrize("wrong", [8, 19, 24, 40])
def test_T18_restore_refuses_a_length_that_the_entries_do_not_have(
    mixed: Reference, text: list[int], wrong: int
) -> None:
    """21 tokens have 5 CSA and 2 HCA entries; a claim of another number of entries is caught before any write."""
    cache = prefilled(mixed.model, [text[:21], text[:8]])
    snapshot = cache.snapshot([0])
    tampered = replace(snapshot, lengths=(wrong,))
    before = deepcopy(cache)
    with pytest.raises(AssertionError, match="does not hold"):
        cache.restore(tampered, rows=[1])
    assert cache.lengths == before.lengths
    assert raw_bytes(cache, 1) == raw_bytes(before, 1)


def test_T18_restore_refuses_what_does_not_fit(mixed: Reference, text: list[int]) -> None:
    model = mixed.model
    snapshot = prefilled(model, [text[:21], text[:3]]).snapshot()
    with pytest.raises(ValueError, match="make a longer cache"):
        model.new_cache(batch_size=2, max_length=20).restore(snapshot)
    with pytest.raises(ValueError, match="another model's state"):
        random_model((0, 4)).new_cache(batch_size=2, max_length=40).restore(snapshot)
    cache = model.new_cache(batch_size=3, max_length=40)
    with pytest.raises(ValueError, match="holds 2 rows, but 1 were named"):
        cache.restore(snapshot, rows=[0])
    with pytest.raises(ValueError, match="must be different"):
        cache.restore(snapshot, rows=[2, 2])
    with pytest.raises(ValueError, match="must be different"):
        model.new_cache(batch_size=1, max_length=40).restore(snapshot)
    assert cache.lengths == (0, 0, 0)
