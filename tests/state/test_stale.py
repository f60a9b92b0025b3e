"""A verification is good for one commit, at once, in its own cache; anything else says why not and what to do."""

from collections.abc import Callable

import pytest

from compressed_spec import TokenTree
from compressed_spec.cache import Cache, Verification
from compressed_spec.drafting import DraftRequest, MTPDrafter
from compressed_spec.testing import Reference, prefilled, raw_bytes
from compressed_spec.tree import TreeShape

TREE = TokenTree(tokens=[5, 6, 7, 8], parents=[-1, 0, 0, 2])


@pytest.fixture
def cache(mixed: Reference, text: list[int]) -> Cache:
    return prefilled(mixed.model, [text[:9], text[:4]], max_nodes=10)


@pytest.fixture
def verify(mixed: Reference, cache: Cache) -> Verification:
    return mixed.model.verify(cache, [TREE, TREE])


def draft(mixed: Reference, cache: Cache) -> None:
    """Drafting with the head overwrites scratch rows that a commit would copy."""
    request = DraftRequest(
        cache=cache,
        rows=(0,),
        roots=(5,),
        shape=TreeShape(num_steps=2, top_k=1, num_nodes=3),
        max_depths=(2,),
        temperatures=(0.0,),
        noise=None,
    )
    MTPDrafter(mixed.model).propose(request)


VOIDERS: dict[str, Callable[[Reference, Cache, Verification], object]] = {
    "committed": lambda mixed, cache, verify: cache.commit(verify, [[0], [0]]),
    "committed empty": lambda mixed, cache, verify: cache.commit(verify, [[], []]),
    "verified again": lambda mixed, cache, verify: mixed.model.verify(cache, [TREE]),
    "prefilled": lambda mixed, cache, verify: mixed.model.prefill(cache, [[3]], rows=[1]),
    "forked": lambda mixed, cache, verify: cache.fork(0, 1),
    "released": lambda mixed, cache, verify: cache.release(1),
    "restored": lambda mixed, cache, verify: cache.restore(cache.snapshot([0]), rows=[1]),
    "drafted": lambda mixed, cache, verify: draft(mixed, cache),
}


@pytest.mark.parametrize("how", VOIDERS)
def test_a_stale_verification_cannot_be_committed(
    mixed: Reference, cache: Cache, verify: Verification, how: str
) -> None:
    VOIDERS[how](mixed, cache, verify)
    lengths, before = cache.lengths, raw_bytes(cache, 0)
    with pytest.raises(ValueError, match="verify again before committing"):
        cache.commit(verify, [[0], [0]])
    assert (cache.lengths, raw_bytes(cache, 0)) == (lengths, before)


def test_a_snapshot_does_not_void_a_verification(cache: Cache, verify: Verification) -> None:
    cache.snapshot()
    cache.check_integrity()
    cache.commit(verify, [[0, 2], [0]])
    assert cache.lengths == (11, 5)


def test_another_caches_verification_cannot_be_committed(mixed: Reference, cache: Cache, text: list[int]) -> None:
    twin = prefilled(mixed.model, [text[:9], text[:4]], max_nodes=10)
    theirs = mixed.model.verify(twin, [TREE, TREE])
    ours = mixed.model.verify(cache, [TREE, TREE])
    with pytest.raises(ValueError, match="verify again before committing"):
        cache.commit(theirs, [[0], [0]])
    cache.commit(ours, [[0], [0]])


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0, 3], [0]], "does not run from the root"),
        ([[2, 3], [0]], "does not run from the root"),
        ([[0, 1, 2], [0]], "does not run from the root"),
        ([[0], [0, 0]], "does not run from the root"),
        ([[0], [4]], "does not run from the root"),
        ([[0], [-1]], "does not run from the root"),
        ([[0]], "one path a tree, got 1 paths for 2"),
        ([[0], [0], []], "one path a tree, got 3 paths for 2"),
    ],
)
def test_a_wrong_path_is_refused_and_costs_nothing(
    cache: Cache, verify: Verification, paths: list[list[int]], message: str
) -> None:
    before = [raw_bytes(cache, row) for row in range(2)]
    with pytest.raises(ValueError, match=message):
        cache.commit(verify, paths)
    assert cache.lengths == (9, 4)
    assert [raw_bytes(cache, row) for row in range(2)] == before
    cache.commit(verify, [[0, 2, 3], [0, 1]])  # it is still good
    assert cache.lengths == (12, 6)
