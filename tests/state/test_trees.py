"""A node's logits are those of its own path, whatever else is in the tree; and any path can be committed."""

import random

import pytest

from compressed_spec import TokenTree
from compressed_spec.testing import (
    Reference,
    assert_near,
    assert_same_state,
    live_state,
    prefilled,
    random_tree,
)


def path_tokens(tree: TokenTree, node: int) -> list[int]:
    return [tree.tokens[i] for i in tree.path_to(node)]


@pytest.mark.parametrize("start", [6, 7, 14])
def test_T07_a_sibling_changes_nothing(reference: Reference, text: list[int], start: int) -> None:
    """A deep node A beside B and B's children, which close windows of their own."""
    model = reference.model
    cache = prefilled(model, [text[:start]])
    without = model.verify(cache, [TokenTree(tokens=[5, 6, 7, 8], parents=[-1, 0, 1, 2])]).logits
    for sibling in (6, 9, 20, 47):
        tree = TokenTree(tokens=[5, sibling, 6, 3, 7, 4, 8, 11], parents=[-1, 0, 0, 1, 2, 3, 4, 5])
        beside = model.verify(cache, [tree]).logits
        for node, alone in ((0, 0), (2, 1), (4, 2), (6, 3)):
            assert_near(beside[node], without[alone], f"node {node} beside {sibling}")


def test_T07_node_order_changes_nothing(reference: Reference, text: list[int]) -> None:
    model, rng = reference.model, random.Random(7)
    cache = prefilled(model, [text[:14]])
    tree = random_tree(rng, 5, num_nodes=14, vocab_size=48)
    logits = model.verify(cache, [tree]).logits
    for _ in range(6):
        order = [0]  # a random order in which parents still precede their children
        while len(order) < len(tree):
            order.append(rng.choice([n for n in range(1, 14) if n not in order and tree.parents[n] in order]))
        moved = TokenTree(
            tokens=[tree.tokens[node] for node in order],
            parents=[-1, *(order.index(tree.parents[node]) for node in order[1:])],
        )
        verify = model.verify(cache, [moved])
        for place, node in enumerate(order):
            assert_near(verify.logits[place], logits[node], f"node {node} at {place}")
        deepest = max(range(14), key=lambda node: len(tree.path_to(node)))
        cache_copy = prefilled(model, [text[:14]])
        cache_copy.commit(model.verify(cache_copy, [moved]), [[order.index(node) for node in tree.path_to(deepest)]])
        tokens = text[:14] + path_tokens(tree, deepest)
        assert_same_state(live_state(cache_copy), live_state(reference.after(tokens).cache), f"order {order}")


@pytest.mark.parametrize("start", [1, 5, 11, 15])
@pytest.mark.parametrize("seed", range(2))
def test_T08_every_path_of_a_random_tree(reference: Reference, text: list[int], start: int, seed: int) -> None:
    model = reference.model
    tree = random_tree(random.Random(f"{seed}/{start}"), 5, num_nodes=12, vocab_size=48)
    verify = model.verify(prefilled(model, [text[:start]]), [tree])
    for node in range(len(tree)):
        expected = reference.after(text[:start] + path_tokens(tree, node)).logits_V
        assert_near(verify.logits[node], expected, f"path {tree.path_to(node)}")


@pytest.mark.parametrize("start", [5, 6, 14, 15])
def test_T08_one_branch_crosses_a_boundary_and_the_other_does_not(
    reference: Reference, text: list[int], start: int
) -> None:
    """Node 1 is a leaf; 2, 3, 4, 5 go on over the boundary, and 6, 7 over the same one with other tokens."""
    model = reference.model
    tree = TokenTree(tokens=[5, 6, 7, 8, 9, 10, 11, 12], parents=[-1, 0, 0, 2, 3, 4, 2, 6])
    for node in (1, 5, 7):
        cache = prefilled(model, [text[:start]])
        verify = model.verify(cache, [tree])
        tokens = text[:start] + path_tokens(tree, node)
        assert_near(verify.logits[node], reference.after(tokens).logits_V, f"leaf {node}")
        cache.commit(verify, [tree.path_to(node)])
        assert_same_state(live_state(cache), live_state(reference.after(tokens).cache), f"leaf {node}")


@pytest.mark.parametrize("start", [7, 13])
def test_T09_depth_counts_and_not_the_index(reference: Reference, text: list[int], start: int) -> None:
    """The same path as nodes 0, 1, 2, 3 and as the last four of many, junk in between at every depth."""
    model = reference.model
    cache = prefilled(model, [text[:start]])
    junk = TokenTree(tokens=[5, 1, 2, 3, 4, 6, 9, 7, 30, 8], parents=[-1, 0, 1, 2, 3, 0, 4, 5, 6, 7])
    verify = model.verify(cache, [junk])
    alone = model.verify(cache, [TokenTree.chain([5, 6, 7, 8])])
    for depth, node in enumerate((0, 5, 7, 9)):
        assert int(verify.plan.position_T[node]) == start + depth
        assert_near(verify.logits[node], alone.logits[depth], f"depth {depth}")
        for name, plan in verify.plan.compressions.items():
            assert int(plan.phase_T[node]) == (start + depth) % int(name[3:])


@pytest.mark.parametrize("start", [3, 9, 12])
def test_T10_scattered_path(reference: Reference, text: list[int], start: int) -> None:
    """Nodes 0, 3, 7, and the longer 0, 3, 7, 9, 12, which crosses boundaries."""
    model = reference.model
    parents = [-1, 0, 1, 0, 2, 1, 3, 3, 6, 7, 5, 9, 9]
    tree = TokenTree(tokens=[5, *range(20, 32)], parents=parents)
    for path in ([0, 3, 7], [0, 3, 7, 9, 12], [0, 1, 5, 10]):
        cache = prefilled(model, [text[:start]])
        verify = model.verify(cache, [tree])
        cache.commit(verify, [path])
        tokens = text[:start] + [tree.tokens[node] for node in path]
        assert cache.lengths == (len(tokens),)
        assert_same_state(live_state(cache), live_state(reference.after(tokens).cache), f"path {path}")
        following = model.verify(cache, [TokenTree.chain([17, 18])])
        assert_near(following.logits[1], reference.after([*tokens, 17, 18]).logits_V, f"after path {path}")
