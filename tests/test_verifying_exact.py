"""Proof by enumeration: the emitted tokens have exactly the target's law, for every rule, tree shape and pair of laws.

Shape suffixes: N nodes of one tree, V vocabulary.

`exact_law` runs the production code (drawing of drafts, verification) once for every way its coins can fall.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from compressed_spec.sampling import target_log_probs
from compressed_spec.sampling_params import SamplingParams
from compressed_spec.tree import TokenTree
from compressed_spec.verifying import Acceptance, Coins, DraftTree, Proposal, exact_law, make_verifier, sampled_children
from compressed_spec.verifying.leviathan import LeviathanVerifier
from compressed_spec.verifying.traversal import TraversalVerifier, _Node

TOLERANCE = 1e-12
ROOT = 0  # the root's token; its value plays no part

Prefix = tuple[int, ...]
Parents = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Laws:
    """Target p and drafter q: log laws of the next token after every prefix."""

    p: dict[Prefix, Tensor]
    q: dict[Prefix, Tensor]


def same_everywhere(weights_V: list[float], depth: int) -> dict[Prefix, Tensor]:
    vocab = range(len(weights_V))
    log_V = (torch.tensor(weights_V, dtype=torch.float64) / sum(weights_V)).log()
    return {prefix: log_V for length in range(depth + 1) for prefix in itertools.product(vocab, repeat=length)}


def random_laws(kind: str, vocab_size: int, depth: int, generator: torch.Generator) -> Laws:
    def draw() -> Tensor:
        return torch.rand(vocab_size, generator=generator, dtype=torch.float64) ** 2 + 1e-3

    def pair() -> tuple[Tensor, Tensor]:
        p_V, q_V = draw(), draw()
        if kind == "zeros":
            p_V[int(torch.randint(vocab_size, (), generator=generator))] = 0
            q_V[int(torch.randint(vocab_size, (), generator=generator))] = 0
        elif kind == "disjoint":
            cut = 1 + int(torch.randint(vocab_size - 1, (), generator=generator))
            p_V[:cut] = 0
            q_V[cut:] = 0
        elif kind == "ties":
            p_V, q_V = p_V.gt(0.25).double() + 1, q_V.gt(0.25).double() + 1
        elif kind == "equal":
            q_V = p_V.clone()
        elif kind == "one_hot":
            p_V = torch.eye(vocab_size, dtype=torch.float64)[int(torch.randint(vocab_size, (), generator=generator))]
        return (p_V / p_V.sum()).log(), (q_V / q_V.sum()).log()

    prefixes = [prefix for n in range(depth + 1) for prefix in itertools.product(range(vocab_size), repeat=n)]
    pairs = {prefix: pair() for prefix in prefixes}
    return Laws(p={k: v[0] for k, v in pairs.items()}, q={k: v[1] for k, v in pairs.items()})


KINDS = ["random", "zeros", "disjoint", "ties", "equal", "one_hot"]


def shapes(num_drafts: int) -> list[Parents]:
    """All ordered trees with this many nodes besides the root, children numbered in order, depth at most 3."""
    found = {
        parents
        for parents in itertools.product(*(range(node) for node in range(1, num_drafts + 1)))
        if list(parents) == sorted(parents)
    }
    trees = sorted((-1, *parents) for parents in found)
    return [parents for parents in trees if max(TokenTree(tokens=parents, parents=parents).depths) <= 3]


def depth_of(parents: Parents) -> int:
    return max(TokenTree(tokens=parents, parents=parents).depths)


def draft_sampled(laws: Laws, parents: Parents, replacement: bool, coins: Coins) -> DraftTree:
    """Draw tokens for a fixed topology; a node whose sibling law ran out of tokens is missing, with what hangs below
    it.
    """
    tokens, kept, new_id = [ROOT], [-1], {0: 0}
    prefixes: list[Prefix] = [()]
    for node in range(len(parents)):
        children = [child for child, parent in enumerate(parents) if parent == node]
        if node not in new_id or not children:
            continue
        prefix = prefixes[new_id[node]]
        for child, token in zip(
            children, sampled_children(laws.q[prefix], len(children), replacement, coins), strict=False
        ):
            new_id[child] = len(tokens)
            tokens.append(token)
            kept.append(new_id[node])
            prefixes.append((*prefix, token))
    return DraftTree(
        tree=TokenTree(tokens=tokens, parents=kept),
        proposal=Proposal.SAMPLED,
        fixed_topology=True,
        log_q=torch.stack([laws.q[prefix] for prefix in prefixes]),
        replacement=replacement,
    )


def target_rows(laws: Laws, tree: TokenTree) -> Tensor:
    return torch.stack([laws.p[tuple(tree.tokens[n] for n in tree.path_to(node)[1:])] for node in range(len(tree))])


Verify = Callable[[DraftTree, Tensor, Coins], Acceptance]


def emitted_law(laws: Laws, draft: Callable[[Coins], DraftTree], verify: Verify) -> dict[Prefix, float]:
    """The exact law of the tokens that one round emits."""

    def run(coins: Coins) -> Prefix:
        tree = draft(coins)
        accepted = verify(tree, target_rows(laws, tree.tree), coins)
        tree.tree.check_path(accepted.path)
        return (*(tree.tree.tokens[node] for node in accepted.path[1:]), accepted.next_token)

    return exact_law(run)


def sampled_law(laws: Laws, parents: Parents, verify: Verify, replacement: bool = True) -> dict[Prefix, float]:
    return emitted_law(laws, lambda coins: draft_sampled(laws, parents, replacement, coins), verify)


def bias(laws: Laws, emitted: dict[Prefix, float], depth: int) -> float:
    """Largest error of the joint law of the first depth + 1 tokens, where the target continues after the round."""

    def target(prefix: Prefix, start: int = 0) -> float:
        return math.exp(sum(float(laws.p[prefix[:i]][prefix[i]]) for i in range(start, len(prefix))))

    vocab = range(len(laws.p[()]))
    return max(
        abs(sum(emitted.get(text[:n], 0.0) * target(text, start=n) for n in range(1, depth + 2)) - target(text))
        for text in itertools.product(vocab, repeat=depth + 1)
    )


def expected_length(emitted: dict[Prefix, float]) -> float:
    return sum(probability * len(text) for text, probability in emitted.items())


def cases(vocab_size: int, depth: int, repeats: int = 2) -> Iterator[Laws]:
    generator = torch.Generator().manual_seed(vocab_size * 10 + depth)
    for kind in KINDS * repeats:
        yield random_laws(kind, vocab_size, depth, generator)


CHAINS = [(3, 1), (3, 2), (4, 2), (5, 2), (3, 3)]


@pytest.mark.parametrize("name", ["leviathan", "block", "traversal", "target", "coupled"])
@pytest.mark.parametrize(("vocab_size", "depth"), CHAINS)
def test_T25_sampled_chains_are_exact(name: str, vocab_size: int, depth: int) -> None:
    parents = tuple(range(-1, depth))
    for laws in cases(vocab_size, depth):
        emitted = sampled_law(laws, parents, make_verifier(name).verify)
        assert bias(laws, emitted, depth) < TOLERANCE


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("filters", [{"top_p": 0.8}, {"top_k": 3}, {"min_p": 0.2}], ids=str)
def test_T25_filtered_laws_are_exact(filters: dict[str, Any], temperature: float) -> None:
    """Eight tokens; the drafter filters less than the target, so that some drafts are excluded."""
    params = SamplingParams(temperature=temperature, **filters)
    prefixes = [prefix for length in range(3) for prefix in itertools.product(range(8), repeat=length)]
    logits = {prefix: torch.randn(1, 8) for prefix in prefixes}
    drafter = SamplingParams(temperature=1.0, top_k=5)
    laws = Laws(
        p={prefix: target_log_probs(logits[prefix], [params])[0] for prefix in prefixes},
        q={prefix: target_log_probs(logits[prefix] + torch.randn(1, 8), [drafter])[0] for prefix in prefixes},
    )
    for name in ("leviathan", "block", "traversal", "target"):
        assert bias(laws, sampled_law(laws, (-1, 0, 1), make_verifier(name).verify), depth=2) < TOLERANCE
    for replacement in (True, False):
        fork = sampled_law(laws, (-1, 0, 0, 1), make_verifier("traversal").verify, replacement)
        assert bias(laws, fork, depth=2) < TOLERANCE


@pytest.mark.parametrize("replacement", [True, False], ids=["iid", "without-replacement"])
@pytest.mark.parametrize("parents", [s for n in (2, 3) for s in shapes(n)], ids=str)
def test_T25_traversal_is_exact_on_every_small_tree(parents: Parents, replacement: bool) -> None:
    depth = depth_of(parents)
    for laws in cases(3, depth):
        emitted = sampled_law(laws, parents, make_verifier("traversal").verify, replacement)
        assert bias(laws, emitted, depth) < TOLERANCE


@pytest.mark.parametrize("replacement", [True, False], ids=["iid", "without-replacement"])
@pytest.mark.parametrize("parents", shapes(4), ids=str)
def test_T25_traversal_is_exact_on_trees_of_four_drafts(parents: Parents, replacement: bool) -> None:
    depth = depth_of(parents)
    for laws in cases(3, depth, repeats=1):
        emitted = sampled_law(laws, parents, make_verifier("traversal").verify, replacement)
        assert bias(laws, emitted, depth) < TOLERANCE


@pytest.mark.parametrize("replacement", [True, False], ids=["iid", "without-replacement"])
@pytest.mark.parametrize(("vocab_size", "parents"), [(4, s) for s in shapes(3)] + [(5, s) for s in shapes(2)], ids=str)
def test_T25_traversal_is_exact_for_larger_vocabularies(vocab_size: int, parents: Parents, replacement: bool) -> None:
    depth = depth_of(parents)
    for laws in cases(vocab_size, depth, repeats=1):
        emitted = sampled_law(laws, parents, make_verifier("traversal").verify, replacement)
        assert bias(laws, emitted, depth) < TOLERANCE


@pytest.mark.parametrize("name", ["target", "coupled"])
@pytest.mark.parametrize("parents", [s for n in (1, 2, 3, 4) for s in shapes(n)], ids=str)
def test_T25_deterministic_trees_are_exact_and_as_long_as_can_be(name: str, parents: Parents) -> None:
    """The length is that of the realised target path inside the tree, which no lossless rule can exceed."""
    ranks = [parents[:node].count(parent) for node, parent in enumerate(parents)]
    tree = TokenTree(tokens=ranks, parents=parents)
    vocab_size, depth = max(3, 1 + max(ranks)), depth_of(parents)
    draft = DraftTree(tree=tree, proposal=Proposal.DETERMINISTIC, fixed_topology=False)
    verifier = make_verifier(name)
    verifier.check(draft)
    for laws in cases(vocab_size, depth):
        emitted = emitted_law(laws, lambda _: draft, verifier.verify)
        assert bias(laws, emitted, depth) < TOLERANCE
        paths = [[tree.tokens[n] for n in tree.path_to(node)[1:]] for node in range(len(tree))]
        reach = [math.exp(sum(float(laws.p[tuple(p[:i])][p[i]]) for i in range(len(p)))) for p in paths]
        assert expected_length(emitted) == pytest.approx(sum(reach), abs=TOLERANCE)


def test_traversal_on_a_chain_is_block_verification() -> None:
    for laws in cases(3, 2, repeats=3):
        block = sampled_law(laws, (-1, 0, 1), make_verifier("block").verify)
        traversal = sampled_law(laws, (-1, 0, 1), make_verifier("traversal").verify)
        assert traversal == pytest.approx(block, abs=TOLERANCE)


def test_block_verification_accepts_at_least_as_much_as_the_token_level_rule() -> None:
    gains = []
    for laws in cases(3, 2, repeats=3):
        block = sampled_law(laws, (-1, 0, 1), make_verifier("block").verify)
        token_level = sampled_law(laws, (-1, 0, 1), make_verifier("leviathan").verify)
        gains.append(expected_length(block) - expected_length(token_level))
    assert min(gains) > -TOLERANCE
    assert max(gains) > 1e-3


def test_one_hot_drafts_make_every_rule_the_target_walk() -> None:
    """A drafter without doubt is a deterministic one; the rules for sampled chains then gain nothing and lose
    nothing.
    """
    for laws in cases(3, 2):
        certain = Laws(p=laws.p, q=same_everywhere([0, 1, 0], depth=2))
        target = sampled_law(certain, (-1, 0, 1), make_verifier("target").verify)
        for name in ("leviathan", "block", "traversal"):
            law = sampled_law(certain, (-1, 0, 1), make_verifier(name).verify)
            for text in target.keys() | law.keys():
                assert law.get(text, 0.0) == pytest.approx(target.get(text, 0.0), abs=TOLERANCE)


def test_leviathan_worked_law() -> None:
    """Vocabulary A, B, C with p = (.5, .3, .2), q = (.6, .1, .3): mass .8 accepted, g = 4 drafts give 3.3616 tokens."""
    laws = Laws(p=same_everywhere([0.5, 0.3, 0.2], 4), q=same_everywhere([0.6, 0.1, 0.3], 4))
    verify = make_verifier("leviathan").verify
    one = sampled_law(laws, (-1, 0), verify)
    accepted = [sum(p for text, p in one.items() if len(text) == 2 and text[0] == token) for token in range(3)]
    assert accepted == pytest.approx([0.5, 0.1, 0.2], abs=TOLERANCE)
    corrected = [one.get((token,), 0.0) for token in range(3)]
    assert corrected == pytest.approx([0.0, 0.2, 0.0], abs=TOLERANCE)
    assert expected_length(sampled_law(laws, (-1, 0, 1, 2, 3), verify)) == pytest.approx(3.3616, abs=TOLERANCE)


def worst_bias(parents: Parents, verify: Verify, replacement: bool, vocab_size: int = 3) -> float:
    depth = depth_of(parents)
    return max(bias(laws, sampled_law(laws, parents, verify, replacement), depth) for laws in cases(vocab_size, depth))


def test_control_ratio_test_on_deterministic_drafts_is_biased() -> None:
    """Passing off the drafter's best token as a draw from q, which `check` refuses when told the truth."""
    laws = Laws(p=same_everywhere([0.5, 0.3, 0.2], 1), q=same_everywhere([0.6, 0.1, 0.3], 1))
    draft = DraftTree(
        tree=TokenTree.chain([ROOT, 0]),
        proposal=Proposal.SAMPLED,
        fixed_topology=True,
        log_q=torch.stack([laws.q[()]] * 2),
        replacement=True,
    )
    assert bias(laws, emitted_law(laws, lambda _: draft, LeviathanVerifier().verify), depth=1) > 0.1


def test_control_pruning_by_value_is_biased() -> None:
    """A drafted 1 is dropped for being a 1: (0.7, 0.3) becomes (0.85, 0.15). The target walk does not mind."""
    laws = Laws(p=same_everywhere([0.7, 0.3], 1), q=same_everywhere([0.5, 0.5], 1))

    def draft(coins: Coins) -> DraftTree:
        full = draft_sampled(laws, (-1, 0), True, coins)
        keep = 2 if full.tree.tokens[1] == 0 else 1
        assert full.log_q is not None
        return DraftTree(
            tree=TokenTree.chain(full.tree.tokens[:keep]),
            proposal=Proposal.SAMPLED,
            fixed_topology=True,
            log_q=full.log_q[:keep],
            replacement=True,
        )

    for name in ("leviathan", "block", "traversal"):
        emitted = emitted_law(laws, draft, make_verifier(name).verify)
        assert sum(p for text, p in emitted.items() if text[0] == 0) == pytest.approx(0.85, abs=TOLERANCE)
    assert bias(laws, emitted_law(laws, draft, make_verifier("target").verify), depth=1) < TOLERANCE


def test_control_draft_law_not_renormalised_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = TraversalVerifier._reject_first_child

    def wrong(parent: _Node, token: int, replacement: bool) -> None:
        q_V = parent.q_V
        correct(parent, token, replacement=True)
        parent.q_V = q_V.index_fill(0, torch.tensor([token]), 0.0)

    assert worst_bias((-1, 0, 0), TraversalVerifier().verify, replacement=False) < TOLERANCE
    monkeypatch.setattr(TraversalVerifier, "_reject_first_child", staticmethod(wrong))
    assert worst_bias((-1, 0, 0), TraversalVerifier().verify, replacement=False) > 1e-2


def test_control_residual_not_renormalised_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rejection the next sibling is judged by (w p - q)+ as it is, though it no longer sums to 1."""
    correct = TraversalVerifier._reject_first_child

    def wrong(parent: _Node, token: int, replacement: bool) -> None:
        rest_V = (parent.weight * parent.p_V - parent.q_V).clamp(min=0)
        correct(parent, token, replacement)
        if float(rest_V.sum()) > 0:
            parent.p_V = rest_V

    for replacement in (True, False):
        assert worst_bias((-1, 0, 0), TraversalVerifier().verify, replacement) < TOLERANCE
        with monkeypatch.context() as patch:
            patch.setattr(TraversalVerifier, "_reject_first_child", staticmethod(wrong))
            assert worst_bias((-1, 0, 0), TraversalVerifier().verify, replacement) > 1e-2


def test_control_residual_not_taken_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing the correction from p instead of the normalised (p - q)+."""
    monkeypatch.setattr("compressed_spec.verifying.leviathan.residual", lambda p_V, q_V, weight: p_V)
    assert worst_bias((-1, 0), LeviathanVerifier().verify, replacement=True) > 1e-2


def test_control_other_weight_after_a_rejection_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variant w <- R / (1 - q(x)) of traversal verification."""
    correct = TraversalVerifier._reject_first_child

    def wrong(parent: _Node, token: int, replacement: bool) -> None:
        mass = float((parent.weight * parent.p_V - parent.q_V).clamp(min=0).sum())
        left = 1 - float(parent.q_V[token])
        is_root = parent.node == 0
        correct(parent, token, replacement)
        if not is_root and left > 0:
            parent.weight = min(1.0, mass / left)

    for replacement in (True, False):
        assert worst_bias((-1, 0, 1, 1), TraversalVerifier().verify, replacement) < TOLERANCE
        with monkeypatch.context() as patch:
            patch.setattr(TraversalVerifier, "_reject_first_child", staticmethod(wrong))
            assert worst_bias((-1, 0, 1, 1), TraversalVerifier().verify, replacement) > 1e-3
