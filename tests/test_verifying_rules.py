"""Verifiers at the edges: extreme coins, worked draws, refused trees, temperature 0, and the production coins' own law.

Shape suffixes: N nodes of one tree, V vocabulary.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor

from compressed_spec.noise import Stream, seed_tensor, uniforms
from compressed_spec.sampling import select_tokens, target_log_probs, target_tokens
from compressed_spec.sampling_params import SamplingParams
from compressed_spec.tree import TokenTree
from compressed_spec.verifying import (
    Acceptance,
    Coins,
    DraftTree,
    GreedyVerifier,
    Proposal,
    UniformCoins,
    draft_coins,
    exact_law,
    make_verifier,
    sampled_children,
    verify_coins,
    walk,
)

ALMOST_ONE = 1 - 2.0**-53
SAMPLED_RULES = ["leviathan", "block", "traversal"]
ALL_RULES = ["coupled", "target", *SAMPLED_RULES]


def log_law(weights_V: list[float]) -> Tensor:
    return (torch.tensor(weights_V, dtype=torch.float64) / sum(weights_V)).log()


def scripted(accept: list[float], choose: list[float]) -> UniformCoins:
    return UniformCoins(accept_uniforms=iter(accept), choose_uniforms=iter(choose), seed=0, position=0)


def constant(u: float) -> UniformCoins:
    return UniformCoins(accept_uniforms=itertools.repeat(u), choose_uniforms=itertools.repeat(u), seed=0, position=0)


def sampled(tokens: list[int], log_q_V: Tensor, parents: list[int] | None = None) -> DraftTree:
    tree = TokenTree.chain(tokens) if parents is None else TokenTree(tokens=tokens, parents=parents)
    return DraftTree(
        tree=tree,
        proposal=Proposal.SAMPLED,
        fixed_topology=True,
        log_q=log_q_V.expand(len(tokens), -1),
        replacement=True,
    )


def test_leviathan_worked_draws() -> None:
    """p = (.5, .3, .2), q = (.6, .1, .3), chain A C B, draws .7 .9 .2, final draw .2: A kept, C rejected, B emitted."""
    a, b, c = range(3)
    draft = sampled([a, a, c, b], log_law([0.6, 0.1, 0.3]))
    log_p_NV = log_law([0.5, 0.3, 0.2]).expand(4, -1)
    accepted = make_verifier("leviathan").verify(draft, log_p_NV, scripted([0.7, 0.9, 0.2], [0.2]))
    assert accepted == Acceptance(path=(0, 1), next_token=b)
    kept = make_verifier("leviathan").verify(draft, log_p_NV, scripted([0.83, 0.66, 0.99], [0.6]))
    assert kept == Acceptance(path=(0, 1, 2, 3), next_token=b)  # 5/6, 2/3 and 1 just suffice; .6 falls on B


@pytest.mark.parametrize("name", SAMPLED_RULES)
def test_equal_laws_accept_everything_and_never_form_the_residual(name: str) -> None:
    log_p_V = log_law([0.5, 0.3, 0.2])
    draft = sampled([0, 1, 2, 0], log_p_V)
    accepted = make_verifier(name).verify(draft, log_p_V.expand(4, -1), constant(ALMOST_ONE))
    assert accepted == Acceptance(path=(0, 1, 2, 3), next_token=2)


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, ALMOST_ONE])
def test_T26_extreme_coins_neither_pass_the_impossible_nor_fail_the_certain(u: float) -> None:
    coins = constant(u)
    assert not coins.accept(0.0)
    assert coins.accept(1.0)
    for weights in ([0.0, 3.0, 0.0], [0.0, 1e-300, 0.0], [0.0, 1e300, 0.0]):
        assert coins.choose(torch.tensor(weights, dtype=torch.float64)) == 1
    assert coins.choose(torch.tensor([0.0, 0.1, 0.2, 0.3, 0.0])) in (1, 2, 3)


@pytest.mark.parametrize("name", ALL_RULES)
@pytest.mark.parametrize("u", [0.0, ALMOST_ONE])
def test_T26_probability_zero_is_never_emitted_and_probability_one_always(name: str, u: float) -> None:
    """Every drafted chain of two tokens and every support of the target, both drawn laws having zeros."""
    for tokens in itertools.product(range(3), repeat=2):
        for zero in range(3):
            weights = [0.4, 0.35, 0.25]
            weights[zero] = 0.0
            draft = sampled([0, *tokens], log_law([0.2, 0.3, 0.5]))
            accepted = make_verifier(name).verify(draft, log_law(weights).expand(3, -1), constant(u))
            emitted = [*(draft.tree.tokens[n] for n in accepted.path[1:]), accepted.next_token]
            assert zero not in emitted
            certain = log_law([float(token == zero) for token in range(3)])
            accepted = make_verifier(name).verify(draft, certain.expand(3, -1), constant(u))
            emitted = [*(draft.tree.tokens[n] for n in accepted.path[1:]), accepted.next_token]
            assert set(emitted) == {zero}
            assert len(accepted.path) - 1 == next((i for i, t in enumerate(tokens) if t != zero), 2)


def test_T26_control_a_coin_that_is_not_strict_emits_probability_zero() -> None:
    class LaxCoins(UniformCoins):
        def accept(self, probability: float) -> bool:
            return next(self.accept_uniforms) <= probability

    zeros = itertools.repeat(0.0)
    coins = LaxCoins(accept_uniforms=zeros, choose_uniforms=zeros, seed=0, position=0)
    draft = sampled([0, 1], log_law([0.5, 0.5]))
    accepted = make_verifier("leviathan").verify(draft, log_law([1.0, 0.0]).expand(2, -1), coins)
    assert accepted.path == (0, 1)  # token 1, which the target excludes


def test_accept_and_choose_spend_separate_uniforms() -> None:
    """A rejecting coin does not decide which correction is drawn."""
    draft = sampled([0, 0], log_law([0.9, 0.05, 0.05]))
    log_p_NV = log_law([0.1, 0.45, 0.45]).expand(2, -1)
    for name in SAMPLED_RULES:
        drawn = {
            make_verifier(name).verify(draft, log_p_NV, scripted([0.99, 0.99], [u])).next_token for u in (0.1, 0.9)
        }
        assert drawn == {1, 2}


@pytest.mark.parametrize("name", SAMPLED_RULES)
def test_T36_trees_that_do_not_fit_are_refused(name: str) -> None:
    verifier = make_verifier(name)
    log_q_NV = torch.zeros(3, 4)
    chain, fork = TokenTree.chain([0, 1, 2]), TokenTree(tokens=[0, 1, 2], parents=[-1, 0, 0])
    for proposal in (Proposal.DETERMINISTIC, Proposal.COUPLED):
        draft = DraftTree(tree=chain, proposal=proposal, fixed_topology=True)
        with pytest.raises(ValueError, match=f"{proposal} drafts have none"):
            verifier.verify(draft, log_q_NV, constant(0.5))
    pruned = DraftTree(tree=chain, proposal=Proposal.SAMPLED, fixed_topology=False, log_q=log_q_NV, replacement=True)
    with pytest.raises(ValueError, match="pruned by value"):
        verifier.check(pruned)
    branching = DraftTree(tree=fork, proposal=Proposal.SAMPLED, fixed_topology=True, log_q=log_q_NV, replacement=True)
    if name == "traversal":
        verifier.check(branching)
    else:
        with pytest.raises(ValueError, match="chains only"):
            verifier.check(branching)
    wrong_law = sampled([0, 1], log_law([1.0, 0.0]))
    with pytest.raises(ValueError, match="draft probability 0"):
        verifier.verify(wrong_law, log_law([0.5, 0.5]).expand(2, -1), constant(0.5))


def test_T36_incomplete_drafts_and_unknown_names_are_refused() -> None:
    tree = TokenTree.chain([0, 1])
    with pytest.raises(ValueError, match="must come with log_q"):
        DraftTree(tree=tree, proposal=Proposal.SAMPLED, fixed_topology=True)
    with pytest.raises(ValueError, match="one row for each of 2 nodes"):
        DraftTree(tree=tree, proposal=Proposal.DETERMINISTIC, fixed_topology=True, log_q=torch.zeros(1, 4))
    with pytest.raises(ValueError, match="'coupled', 'target', 'leviathan', 'block', 'traversal'"):
        make_verifier("typical")
    assert [make_verifier(name).name for name in ALL_RULES] == ALL_RULES


def test_sampled_children_have_the_law_of_drawing() -> None:
    log_q_V = log_law([0.6, 0.3, 0.1, 0.0])
    q = log_q_V.exp().tolist()
    iid = exact_law(lambda coins: tuple(sampled_children(log_q_V, 2, True, coins)))
    assert iid == pytest.approx({(a, b): q[a] * q[b] for a, b in itertools.product(range(3), repeat=2)})
    distinct = exact_law(lambda coins: tuple(sampled_children(log_q_V, 2, False, coins)))
    assert distinct == pytest.approx({(a, b): q[a] * q[b] / (1 - q[a]) for a, b in itertools.permutations(range(3), 2)})
    exhausted = exact_law(lambda coins: tuple(sampled_children(log_q_V, 5, False, coins)))
    assert exhausted.keys() == set(itertools.permutations(range(3)))
    with pytest.raises(ValueError, match="at least one"):
        sampled_children(log_q_V, 0, True, constant(0.5))


def test_walk_follows_the_chosen_tokens() -> None:
    tree = TokenTree(tokens=[9, 1, 2, 1, 3], parents=[-1, 0, 0, 2, 2])
    assert walk(tree, [7, 0, 0, 0, 0]) == Acceptance(path=(0,), next_token=7)
    assert walk(tree, [2, 0, 3, 0, 5]) == Acceptance(path=(0, 2, 4), next_token=5)
    assert walk(tree, [2, 0, 4, 0, 5]) == Acceptance(path=(0, 2), next_token=4)


def test_T27_temperature_zero_takes_the_best_tokens_under_every_rule() -> None:
    logits_NV = torch.randn(4, 6)
    log_p_NV = target_log_probs(logits_NV, [SamplingParams()] * 4)
    best = logits_NV.argmax(-1).tolist()
    draft = sampled([0, best[0], best[1], (best[2] + 1) % 6], log_law([1.0] * 6))
    expected = Acceptance(path=(0, 1, 2), next_token=best[2])
    assert GreedyVerifier().verify(draft, logits_NV, constant(0.5)) == expected
    for name, u in itertools.product(ALL_RULES, [0.0, 0.5, ALMOST_ONE]):
        assert make_verifier(name).verify(draft, log_p_NV, constant(u)) == expected


def test_T28_coupled_text_is_that_of_plain_sampling_whatever_is_drafted() -> None:
    """Random trees, some with the target's own tokens in them; also the batched form against the verifier."""
    vocab_size, generator = 5, torch.Generator().manual_seed(5)
    logits: dict[tuple[int, ...], Tensor] = {}

    def log_p_after(text: tuple[int, ...], params: SamplingParams) -> Tensor:
        if text not in logits:
            logits[text] = torch.randn(vocab_size, generator=generator)
        return target_log_probs(logits[text][None], [params])[0]

    def pick(bound: int) -> int:
        return int(torch.randint(bound, (), generator=generator))

    num_accepted = 0
    for seed in range(60):
        params = SamplingParams(temperature=1.3, top_p=0.9, seed=seed)
        plain: tuple[int, ...] = ()
        while len(plain) < 5:
            at = torch.tensor([10 + len(plain)])
            plain += (int(select_tokens(log_p_after(plain, params)[None], seed_tensor([seed]), at)),)
        text: tuple[int, ...] = ()
        while len(text) < 4:
            size = 1 + pick(7)
            parents = [-1, *(pick(node) for node in range(1, size))]
            tree = TokenTree(tokens=[pick(vocab_size) for _ in range(size)], parents=parents)
            below = [text + tuple(tree.tokens[n] for n in tree.path_to(node)[1:]) for node in range(size)]
            draft = DraftTree(tree=tree, proposal=Proposal.DETERMINISTIC, fixed_topology=False)
            log_p_NV = torch.stack([log_p_after(prefix, params) for prefix in below])
            accepted = make_verifier("coupled").verify(draft, log_p_NV, verify_coins(seed, 10 + len(text)))
            positions = torch.tensor([10 + len(prefix) for prefix in below])
            logits_NV = torch.stack([logits[prefix] for prefix in below])
            assert walk(tree, target_tokens(logits_NV, [params] * size, positions).tolist()) == accepted
            num_accepted += len(accepted.path) - 1
            text += (*(tree.tokens[node] for node in accepted.path[1:]), accepted.next_token)
        assert text[:4] == plain[:4]
    assert num_accepted > 20


def test_T28_production_coins_are_reproducible_and_of_their_own_streams() -> None:
    def draws(coins: Coins) -> list[int]:
        return [coins.choose(torch.ones(1000)) for _ in range(5)]

    assert draws(verify_coins(3, 7)) == draws(verify_coins(3, 7))
    different = [verify_coins(3, 7), verify_coins(4, 7), verify_coins(3, 8), draft_coins(3, 7)]
    assert len({tuple(draws(coins)) for coins in different}) == 4
    coins, accepts, chooses = verify_coins(3, 7), uniforms(3, Stream.ACCEPT, 7), uniforms(3, Stream.RESIDUAL, 7)
    for _ in range(50):
        assert coins.accept(0.4) == (next(accepts) < 0.4)
        assert coins.choose(torch.ones(1000)) == int(next(chooses) * 1000)


@pytest.mark.parametrize("name", ["target", *SAMPLED_RULES])
def test_T25_joint_law_with_production_coins(name: str) -> None:
    """Chi-square over the first two tokens of 3000 requests: drafted, verified and continued with the real coins."""
    vocab_size, count = 8, 3000
    logits_VV = torch.randn(vocab_size, vocab_size, dtype=torch.float64)
    filters = SamplingParams(temperature=1.2, top_p=0.9, top_k=6)
    log_p_VV = target_log_probs(logits_VV, [filters] * vocab_size)
    log_q_VV = (logits_VV + torch.randn(vocab_size, vocab_size)).log_softmax(-1)
    verifier = make_verifier(name)
    branching = name in ("traversal", "target")

    counts = torch.zeros(vocab_size, vocab_size, dtype=torch.float64)
    for seed in range(count):
        text: list[int] = []
        while len(text) < 2:
            root = text[-1] if text else 0
            position = 4 + len(text)
            coins = draft_coins(seed, position)
            tokens, parents = [root], [-1]
            for node in range(3 if branching else 2):
                for token in sampled_children(log_q_VV[tokens[node]], 2 if branching else 1, False, coins):
                    tokens.append(token)
                    parents.append(node)
            draft = DraftTree(
                tree=TokenTree(tokens=tokens, parents=parents),
                proposal=Proposal.SAMPLED,
                fixed_topology=True,
                log_q=log_q_VV[tokens],
                replacement=False,
            )
            accepted = verifier.verify(draft, log_p_VV[tokens], verify_coins(seed, position))
            text += [*(tokens[node] for node in accepted.path[1:]), accepted.next_token]
        counts[text[0], text[1]] += 1
    expected = log_p_VV[0].exp()[:, None] * log_p_VV.exp() * count
    assert counts[expected == 0].sum() == 0
    likely = expected >= 5
    rest = float(expected[~likely].sum())
    chi = float(((counts - expected) ** 2 / expected)[likely].sum())
    chi += (float(counts[~likely].sum()) - rest) ** 2 / max(rest, 1e-9)
    degrees = int(likely.sum())
    assert chi < degrees + 4 * math.sqrt(2 * degrees)
