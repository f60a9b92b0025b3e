"""A rejected tail leaves no trace, and any accepted prefix leaves what one token at a time would have left."""

from copy import deepcopy

import pytest

from compressed_spec import TokenTree
from compressed_spec.testing import (
    Reference,
    assert_near,
    assert_same_state,
    live_state,
    prefilled,
    random_model,
    raw_bytes,
)

PREFIXES = range(1, 25)  # every phase of ratios 3, 4, 5 and 8, before and after the window of 8 has filled


def wrong(tokens: list[int]) -> list[int]:
    return [(token + 1) % 48 for token in tokens]


def test_T01_a_rejected_tail_never_happened(reference: Reference, text: list[int]) -> None:
    model = reference.model
    cache = prefilled(model, [text[:n] for n in PREFIXES], max_nodes=24 * 17)
    before = [raw_bytes(cache, row) for row in range(24)]
    for k in range(1, 2 * 8 + 2):
        rejected = model.verify(cache, [TokenTree.chain(wrong(text[n : n + k])) for n in PREFIXES])
        cache.commit(rejected, [[] for _ in PREFIXES])
        assert [raw_bytes(cache, row) for row in range(24)] == before
        assert cache.lengths == tuple(PREFIXES)
        right = model.verify(cache, [TokenTree.chain(text[n : n + k]) for n in PREFIXES])
        for row, n in enumerate(PREFIXES):
            for i in range(k):
                expected = reference.after(text[: n + i + 1]).logits_V
                assert_near(right.logits[row * k + i], expected, f"prefix {n}, right tail of {k}, token {i}")
    cache.commit(right, [range(k) for _ in PREFIXES])
    for row, n in enumerate(PREFIXES):
        assert_same_state(live_state(cache, row), live_state(reference.after(text[: n + k]).cache), f"prefix {n}")


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5, 7, 8, 9, 12, 17])
def test_T02_every_accepted_prefix_of_k_drafts(reference: Reference, text: list[int], k: int) -> None:
    """The root and k drafts, of which a = 0 .. k are accepted."""
    model = reference.model
    prefixes = range(10, 18)
    cache = prefilled(model, [text[:n] for n in prefixes], max_nodes=8 * 18)
    verify = model.verify(cache, [TokenTree.chain(text[n : n + k + 1]) for n in prefixes])
    for accepted in range(k + 1):
        branch, its_verify = deepcopy((cache, verify))
        branch.commit(its_verify, [range(accepted + 1) for _ in prefixes])
        for row, n in enumerate(prefixes):
            expected = reference.after(text[: n + accepted + 1])
            assert branch.lengths[row] == n + accepted + 1
            assert_same_state(live_state(branch, row), live_state(expected.cache), f"{n} + {accepted + 1} of {k + 1}")


@pytest.mark.parametrize("hca", [3, 8])
def test_T03_boundaries_inside_a_round(text: list[int], hca: int) -> None:
    """From every offset mod lcm(4, HCA ratio), 9 tokens close two CSA windows; the accepted part ends anywhere."""
    reference = Reference(random_model((4, hca)))
    model = reference.model
    prefixes = range(24, 36)
    cache = prefilled(model, [text[:n] for n in prefixes], max_nodes=12 * 9)
    verify = model.verify(cache, [TokenTree.chain(text[n : n + 9]) for n in prefixes])
    for accepted in range(1, 10):
        branch, its_verify = deepcopy((cache, verify))
        branch.commit(its_verify, [range(accepted) for _ in prefixes])
        # One more round, which reads what was committed: entries, their count, their positions, half-filled windows.
        after = model.verify(branch, [TokenTree.chain(text[n + accepted : n + accepted + 4]) for n in prefixes])
        for row, n in enumerate(prefixes):
            length = n + accepted
            assert_same_state(live_state(branch, row), live_state(reference.after(text[:length]).cache), f"{length}")
            for i in range(4):
                expected = reference.after(text[: length + i + 1]).logits_V
                assert_near(after.logits[4 * row + i], expected, f"{n} + {accepted} + {i}")


@pytest.mark.parametrize("end", [12, 16, 32])
@pytest.mark.parametrize("off_by", [-1, 0, 1])
def test_T04_overlap_half_after_accepting_to_a_window_end(text: list[int], end: int, off_by: int) -> None:
    """The next entry pools the window before it: both must survive the commit, whichever rows it took."""
    reference = Reference(random_model((4,)))
    model = reference.model
    cache = prefilled(model, [text[: end - 6]])
    verify = model.verify(cache, [TokenTree.chain(text[end - 6 : end + 3])])
    cache.commit(verify, [range(6 + off_by)])
    rest = model.verify(cache, [TokenTree.chain(text[end + off_by : end + 8])])
    cache.commit(rest, [range(8 - off_by)])
    expected = reference.after(text[: end + 8]).cache
    assert_near(
        cache.pools["compressed_kv.csa4"][:, : (end + 8) // 4], live_state(expected)["compressed_kv.csa4"], "kv"
    )
    assert_same_state(live_state(cache), live_state(expected), f"window end {end} {off_by:+d}")


def test_T04_the_first_entry_pools_nothing_before_the_text(text: list[int]) -> None:
    """Written out: of two windows only the newer exists, with its own half of the channels, and RoPE turns by 0."""
    model = random_model((4,))
    cache = prefilled(model, [text[:4]])
    kv, gate = live_state(cache)["buffer.csa4"][0].chunk(2, dim=-1)
    half = kv.shape[-1] // 2
    weights = gate[:, half:].exp()
    pooled = (weights * kv[:, half:]).sum(0) / weights.sum(0)
    weight = model.state_dict()["layers.0.attn.compressor.norm.weight"]
    expected = pooled / (pooled.square().mean() + 1e-6).sqrt() * weight
    assert_near(cache.pools["compressed_kv.csa4"][0, 0], expected, "entry 0")
