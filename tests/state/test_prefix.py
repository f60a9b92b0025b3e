"""Reuse of a common prefix is exact at the lengths that were kept, and nothing is claimed at others."""

import pytest

from compressed_spec.prefix import PrefixStore
from compressed_spec.testing import Reference, assert_near, assert_same_state, live_state, prefilled


def test_T19_reuse_at_every_length_is_as_cold(reference: Reference, text: list[int]) -> None:
    """Two prompts share their first n tokens; the second takes them from the store of the first."""
    model = reference.model
    lengths = range(1, 34)
    first = prefilled(model, [text[:n] for n in lengths])
    store = PrefixStore()
    for row, n in enumerate(lengths):
        store.put(text[:n], first.snapshot([row]))
    warm = model.new_cache(batch_size=len(lengths), max_length=60)
    prompts = [[*text[:n], (text[n] + 1) % 48, 9, 3] for n in lengths]
    rests = []
    for row, (n, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        match = store.longest(prompt[:-1])
        assert match.length == n
        assert match.snapshot is not None
        warm.restore(match.snapshot, rows=[row])
        rests.append(prompt[match.length :])
    logits = model.prefill(warm, rests)
    for row, prompt in enumerate(prompts):
        expected = reference.after(prompt)
        assert_near(logits[row], expected.logits_V, f"shared {lengths[row]}")
        assert_same_state(live_state(warm, row), live_state(expected.cache), f"shared {lengths[row]}")


def test_T19_between_two_kept_lengths_the_shorter_is_returned(mixed: Reference, text: list[int]) -> None:
    cache = prefilled(mixed.model, [text[:8], text[:20]])
    store = PrefixStore()
    store.put(text[:8], cache.snapshot([0]))
    store.put(text[:20], cache.snapshot([1]))
    found = [store.longest(text[:n]).length for n in (0, 7, 8, 9, 19, 20, 21, 60)]
    assert found == [0, 0, 8, 8, 8, 20, 20, 20]
    assert store.longest(text[:7]).snapshot is None
    assert store.longest([*text[:19], 47 - text[19]]).length == 8
    assert store.longest([47 - text[0], *text[1:30]]).length == 0


def test_T19_the_least_recently_used_go_first(mixed: Reference, text: list[int]) -> None:
    cache = prefilled(mixed.model, [text[:3], text[10:13], text[20:23]])
    snapshots = [cache.snapshot([row]) for row in range(3)]
    store = PrefixStore(max_bytes=2 * snapshots[0].nbytes)
    store.put(text[:3], snapshots[0])
    store.put(text[10:13], snapshots[1])
    store.longest(text[:5])
    store.put(text[20:23], snapshots[2])
    assert len(store) == 2
    assert store.nbytes == 2 * snapshots[0].nbytes
    assert [store.longest(text[n : n + 5]).length for n in (0, 10, 20)] == [3, 0, 3]


def test_T19_a_state_under_the_wrong_tokens_is_refused(mixed: Reference, text: list[int]) -> None:
    snapshot = prefilled(mixed.model, [text[:8], text[:9]]).snapshot()
    for tokens in (text[:8], text[:17], []):
        with pytest.raises(ValueError, match=r"take it with cache.snapshot\(\[row\]\)"):
            PrefixStore().put(tokens, snapshot)
