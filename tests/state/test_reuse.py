"""Early exit: verification goes on from where drafting stopped, and all is as if nobody had drafted."""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from compressed_spec import TokenTree, generate
from compressed_spec.cache import Cache
from compressed_spec.drafting import DraftPlan, DraftRequest, EarlyExitDrafter, MTPDrafter
from compressed_spec.drafting.early_exit import EarlyExitSteps
from compressed_spec.models.deepseek_v4.names import DraftHeadKind
from compressed_spec.testing import (
    Reference,
    assert_near,
    assert_same_state,
    live_state,
    poison,
    prefilled,
    random_model,
    random_text,
)
from compressed_spec.topology import Topology
from compressed_spec.tree import TreeShape, parse_tree

SHAPE = TreeShape(num_steps=4, top_k=2, num_nodes=7)
OTHER = random_text(30, seed=8)


@pytest.fixture(scope="module")
def block() -> Reference:
    """A DSpark head, which reads the streams after layers that a draft went through (0) and did not (2)."""
    return Reference(
        random_model((0, 4, 8), draft_head=DraftHeadKind.DSPARK, num_draft_layers=2, dspark_target_layer_ids=[0, 2])
    )


def request(cache: Cache, rows: Sequence[int], roots: Sequence[int], shape: TreeShape = SHAPE) -> DraftRequest:
    return DraftRequest(
        cache=cache,
        rows=tuple(rows),
        roots=tuple(roots),
        shape=shape,
        max_depths=(shape.num_steps,) * len(rows),
        temperatures=(0.0,) * len(rows),
        noise=None,
    )


@contextmanager
def layer_evaluations(reference: Reference) -> Iterator[Counter[int]]:
    """Nodes that went through each layer."""
    counts: Counter[int] = Counter()

    def counter(layer: int) -> object:
        return lambda module, inputs: counts.update({layer: len(inputs[0])})

    layers = reference.model.get_submodule("layers")
    hooks = [block.register_forward_pre_hook(counter(i)) for i, block in enumerate(layers.children())]  # type: ignore[arg-type]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def check_verified(
    reference: Reference, cache: Cache, texts: Sequence[Sequence[int]], trees: Sequence[TokenTree]
) -> None:
    """Verify the trees, commit each one's deepest path: logits after every node, and state, are plain decoding's."""
    verify = reference.model.verify(cache, trees)
    first, ends = 0, []
    for text, tree in zip(texts, trees, strict=True):
        for node in range(len(tree)):
            path = [tree.tokens[ancestor] for ancestor in tree.path_to(node)]
            assert_near(verify.logits[first + node], reference.after([*text, *path]).logits_V, f"logits after {path}")
        first += len(tree)
        ends.append(tree.path_to(max(range(len(tree)), key=lambda node: tree.depths[node])))
    cache.commit(verify, ends)
    cache.check_integrity()
    for row, (text, tree, path) in enumerate(zip(texts, trees, ends, strict=True)):
        tokens = [*text, *(tree.tokens[node] for node in path)]
        assert_same_state(live_state(cache, row), live_state(reference.after(tokens).cache), f"row {row}")


@pytest.mark.parametrize("exit_layer", [1, 3, 5])
@pytest.mark.parametrize("length", [6, 13, 22])
def test_T01_state_and_logits_after_reuse(deep: Reference, text: list[int], exit_layer: int, length: int) -> None:
    """Rows of different lengths, entries closed while drafting and while verifying, everything else poisoned."""
    texts = [text[:length], text[: length // 2 + 1], OTHER[:length]]
    cache = prefilled(deep.model, texts)
    drafter = EarlyExitDrafter(deep.model, exit_layer)
    for _ in range(2):
        poison(cache)
        trees = drafter.propose(request(cache, range(3), [5, 6, 7]))
        assert cache.stopped is not None
        check_verified(deep, cache, texts, trees)
        deepest = [tree.path_to(max(range(len(tree)), key=lambda node: tree.depths[node])) for tree in trees]
        texts = [
            [*text, *(tree.tokens[n] for n in path)] for text, tree, path in zip(texts, trees, deepest, strict=True)
        ]


@pytest.mark.parametrize("exit_layer", [1, 2])
def test_T01_models_with_a_dspark_head(block: Reference, text: list[int], exit_layer: int) -> None:
    texts = [text[:11], OTHER[:6]]
    cache = prefilled(block.model, texts)
    poison(cache)
    trees = EarlyExitDrafter(block.model, exit_layer).propose(request(cache, [0, 1], [5, 6]))
    check_verified(block, cache, texts, trees)


def other_trees(tree: TokenTree, vocab_size: int, rng: random.Random) -> Iterator[TokenTree]:
    """What may become of a proposed tree on its way to verification, and what may not but could."""
    yield TokenTree(tokens=tree.tokens[:1], parents=[-1])
    yield TokenTree(tokens=tree.tokens[:4], parents=tree.parents[:4])
    # Another order: depth first, last children first.
    order, stack = list[int](), [0]
    while stack:
        order.append(stack.pop())
        stack += tree.children(order[-1])
    yield TokenTree(
        tokens=[tree.tokens[node] for node in order],
        parents=[-1 if node == 0 else order.index(tree.parents[node]) for node in order],
    )
    # New nodes below drafted ones and below each other, and siblings that repeat a drafted token.
    tokens, parents = list(tree.tokens), list(tree.parents)
    for _ in range(5):
        parents.append(rng.randrange(len(tokens)))
        tokens.append(rng.choice([*tree.tokens, rng.randrange(vocab_size)]))
    yield TokenTree(tokens=tokens, parents=parents)
    yield TokenTree(tokens=[tree.tokens[0], tree.tokens[1], tree.tokens[1], 3, 3], parents=[-1, 0, 0, 1, 2])
    # Another root.
    yield TokenTree(tokens=[tree.tokens[0] + 1, *tree.tokens[1:]], parents=tree.parents)


def test_any_tree_may_be_verified_after_drafting(deep: Reference, text: list[int]) -> None:
    rng = random.Random(0)
    drafter, texts = EarlyExitDrafter(deep.model, 3), [text[:13], OTHER[:6]]
    proposed = drafter.propose(request(prefilled(deep.model, texts), [0, 1], [5, 6]))
    variants = [list(other_trees(tree, 48, rng)) for tree in proposed]
    for trees in zip(*variants, strict=True):
        cache = prefilled(deep.model, texts)
        poison(cache)
        assert drafter.propose(request(cache, [0, 1], [5, 6])) == proposed
        claim = None if cache.stopped is None else cache.stopped.claim(trees, [0, 1])
        assert claim is None or sorted(set(claim.slot_T)) == sorted(claim.slot_T), "a slot is one node's"
        check_verified(deep, cache, texts, trees)


def test_rows_that_were_not_drafted_and_drafts_of_other_rows(deep: Reference, text: list[int]) -> None:
    """One of three rows is drafted; all are verified, and the drafted row's tree in another row finds nothing."""
    texts = [text[:13], text[:13], OTHER[:6]]
    cache = prefilled(deep.model, texts)
    poison(cache)
    (tree,) = EarlyExitDrafter(deep.model, 3).propose(request(cache, [1], [5]))
    stopped = cache.stopped
    assert stopped is not None
    assert stopped.claim([tree, TokenTree.chain([3, 4])], [0, 2]) is None
    claim = stopped.claim([tree], [1])
    assert claim is not None
    assert claim.new_T.sum() < len(tree)
    check_verified(deep, cache, texts, [tree, tree, TokenTree.chain([3, 4])])


@pytest.mark.parametrize("exit_layer", [1, 3, 5])
@pytest.mark.parametrize("shape", ["s4_k2_d7", "s3_k1_d4", "s3_k3_d16", "s1_k3_d3"])
def test_a_verified_node_goes_through_each_layer_once(
    deep: Reference, text: list[int], shape: str, exit_layer: int
) -> None:
    """verified x L + (drafted and dropped) x E, never verified x (L + E)."""
    wanted = parse_tree(shape)
    assert wanted is not None
    cache = prefilled(deep.model, [text[:13], OTHER[:6]])
    with layer_evaluations(deep) as drafting:
        trees = EarlyExitDrafter(deep.model, exit_layer).propose(request(cache, [0, 1], [5, 6], wanted))
    processed = cache.stopped
    assert processed is not None
    drafted = len(processed.slot_of)
    assert drafting == dict.fromkeys(range(exit_layer), drafted)
    assert drafted == 2 * wanted.num_draft_nodes
    verified = sum(map(len, trees))
    claim = processed.claim(trees, [0, 1])
    assert claim is not None
    kept = int((~claim.new_T).sum())
    with layer_evaluations(deep) as verifying:
        deep.model.verify(cache, trees)
    expected = {layer: verified - kept if layer < exit_layer else verified for layer in range(6)}
    assert verifying == Counter(expected)
    total = sum(drafting.values()) + sum(verifying.values())
    assert total == verified * 6 + (drafted - kept) * exit_layer
    # What has children was drafted from, and so was the root.
    inner = [bool(tree.children(node)) for tree in trees for node in range(len(tree))]
    assert not claim.new_T[inner].any()


def test_whole_runs_recompute_nothing(deep: Reference, text: list[int]) -> None:
    """All inner nodes of a chain are reused, so a chain of n drafts costs n + 1 nodes in every layer."""
    with layer_evaluations(deep) as counts:
        out = generate(
            deep.model, [text[:9]], tree="s3_k1_d4", drafter="early-exit:2", max_new_tokens=20, stop_token_ids=[]
        )[0]
    assert out.stats.num_draft_errors == 0
    nodes = 9 + out.stats.num_rounds + out.stats.num_draft_tokens
    assert counts == dict.fromkeys(range(6), nodes)


def test_other_drafters_pay_nothing(deep: Reference, text: list[int]) -> None:
    for drafter in ("mtp", "ngram"):
        with layer_evaluations(deep) as counts:
            out = generate(
                deep.model, [text[:9]], tree="s3_k2_d6", drafter=drafter, max_new_tokens=9, stop_token_ids=[]
            )[0]
        nodes = 9 + out.stats.num_rounds + out.stats.num_draft_tokens
        assert counts == dict.fromkeys(range(6), nodes)


def commit_a_token(reference: Reference, cache: Cache) -> None:
    verify = reference.model.verify(cache, [TokenTree.chain([9])], rows=[1])
    cache.commit(verify, [[0]])


VOIDERS: dict[str, Callable[[Reference, Cache], object]] = {
    "forked": lambda reference, cache: cache.fork(1, 2),
    "released": lambda reference, cache: cache.release(2),
    "restored": lambda reference, cache: cache.restore(cache.snapshot([1]), rows=[2]),
    "prefilled": lambda reference, cache: reference.model.prefill(cache, [[3]], rows=[2]),
    "verified": lambda reference, cache: reference.model.verify(cache, [TokenTree.chain([8, 2])], rows=[1]),
    "committed": commit_a_token,
    "drafted with a head": lambda reference, cache: MTPDrafter(reference.model).propose(request(cache, [1], [5])),
}


@pytest.mark.parametrize("how", VOIDERS)
def test_whatever_comes_between_voids_the_reuse(deep: Reference, text: list[int], how: str) -> None:
    cache = prefilled(deep.model, [text[:13], OTHER[:6], OTHER[:7]])
    (tree,) = EarlyExitDrafter(deep.model, 3).propose(request(cache, [0], [5]))
    VOIDERS[how](deep, cache)
    assert cache.stopped is None
    poison(cache)
    with layer_evaluations(deep) as counts:
        verify = deep.model.verify(cache, [tree], rows=[0])
    assert counts == {layer: len(tree) for layer in range(6)}
    for node in range(len(tree)):
        path = [tree.tokens[ancestor] for ancestor in tree.path_to(node)]
        assert_near(verify.logits[node], deep.after([*text[:13], *path]).logits_V, f"logits after {path}")


def test_a_verification_voids_the_reuse_itself(deep: Reference, text: list[int]) -> None:
    """Once its rows are overwritten or committed, a second verification of the same tree starts from the bottom."""
    cache = prefilled(deep.model, [text[:13]])
    (tree,) = EarlyExitDrafter(deep.model, 3).propose(request(cache, [0], [5]))
    deep.model.verify(cache, [tree])
    poison(cache)
    check_verified(deep, cache, [text[:13]], [tree])


def test_drafting_on_after_another_round_began_is_refused(deep: Reference, text: list[int]) -> None:
    cache = prefilled(deep.model, [text[:13]])
    steps = EarlyExitSteps(deep.model, request(cache, [0], [5]), 3)
    steps.root()
    cache.release(0)
    with pytest.raises(AssertionError, match="another round"):
        steps.root()


def test_the_early_law_is_the_heads_on_early_streams(deep: Reference, text: list[int]) -> None:
    """Against a model that ends at the exit, with the same weights."""
    short = random_model((0, 4, 8))
    own = dict(deep.model.state_dict())
    short.load_state_dict({name: own[name] for name in short.state_dict()})
    cache = prefilled(deep.model, [text[:13]])
    steps = EarlyExitSteps(deep.model, request(cache, [0], [5]), 3)
    laws = [steps.root(), steps.descend(torch.tensor([[7, 8]]).numpy(), torch.tensor([[0, 0]]).numpy())]
    for path, law_V in (
        ([5], laws[0].log_q_BFV[0, 0]),
        ([5, 7], laws[1].log_q_BFV[0, 0]),
        ([5, 8], laws[1].log_q_BFV[0, 1]),
    ):
        logits_V = Reference(short).after([*text[:13], *path]).logits_V
        assert_near(law_V, torch.log_softmax(logits_V, dim=-1), f"law after {path}")


def test_topologies_are_kept_to(deep: Reference, text: list[int]) -> None:
    topology = Topology(parents=(-1, 0, 0, 0, 1, 1, 4))
    cache = prefilled(deep.model, [text[:13]])
    plan = DraftPlan(shape=topology.shape, topology=topology)
    asked = DraftRequest(
        cache=cache,
        rows=(0,),
        roots=(5,),
        shape=plan.shape,
        topology=topology,
        max_depths=(3,),
        temperatures=(0.0,),
        noise=None,
    )
    with layer_evaluations(deep) as counts:
        (tree,) = EarlyExitDrafter(deep.model, 2).propose(asked)
        deep.model.verify(cache, [tree])
    assert tree.parents == topology.parents
    assert counts[0] == counts[5] == len(topology)


def test_T36_a_cache_with_too_few_slots(deep: Reference, text: list[int]) -> None:
    cache = deep.model.new_cache(max_length=40, max_nodes=6, prefill_chunk=4)
    deep.model.prefill(cache, [text[:13]])
    drafter = EarlyExitDrafter(deep.model, 2)
    with pytest.raises(ValueError, match=r"7 nodes .* larger max_nodes"):
        drafter.propose(request(cache, [0], [5]))
    trees = drafter.propose(request(cache, [0], [5], TreeShape(num_steps=3, top_k=2, num_nodes=6)))
    check_verified(deep, cache, [text[:13]], trees)
