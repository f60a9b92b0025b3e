"""A drafter may propose anything, or fail anywhere: it can cost speed, never the text."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from compressed_spec import TokenTree, generate
from compressed_spec.drafting import DraftRequest
from compressed_spec.testing import Reference, greedy_text
from compressed_spec.verifying import Coins, DraftTree, Proposal

COUNT = 14
SHAPE = "s3_k2_d6"


class Puppet:
    """Proposes what its script says; raises where it is told to."""

    def __init__(self, script: str, expected: Sequence[int]) -> None:
        self.script, self.expected, self.num_emitted = script, list(expected), 1

    def start(self, row: int, token_ids: Sequence[int]) -> None:
        self._maybe_raise("start")

    def observe(self, row: int, token_ids: Sequence[int]) -> None:
        self.num_emitted += len(token_ids)
        self._maybe_raise("observe")

    def release(self, row: int) -> None:
        self._maybe_raise("release")

    def _maybe_raise(self, where: str) -> None:
        if self.script == f"raise in {where}":
            raise RuntimeError("a drafter's own fault")

    def propose(self, request: DraftRequest) -> Sequence[TokenTree]:
        root = request.roots[0]
        true = [*self.expected[self.num_emitted :], 3, 3, 3][:3]
        chains = {
            "minus one": [root, -1, true[1], true[2]],
            "vocab_size": [root, true[0], 48, true[2]],
            "huge": [root, 2**40],
            "eos": [root, 1, 1, 1],
            "bos": [root, 0, 0, 0],
            "wrong root": [(root + 1) % 48, *true],
            "oversize": [root, *true, *range(40)],
            "raise in start": [root, *true],
            "raise in observe": [root, *true],
            "raise in release": [root, *true],
        }
        if self.script in chains:
            return [TokenTree.chain(chains[self.script])]
        if self.script == "twin siblings":  # the second twin has the right child
            return [TokenTree(tokens=[root, true[0], true[0], 9, true[1]], parents=[-1, 0, 0, 1, 2])]
        if self.script == "wide":
            return [TokenTree(tokens=[root, *range(48)], parents=[-1, *[0] * 48])]
        if self.script == "too many trees":
            return [TokenTree.chain([root, *true])] * 3
        if self.script == "raise in propose":
            raise RuntimeError("a drafter's own fault")
        return []


SCRIPTS = [
    "minus one",
    "vocab_size",
    "huge",
    "eos",
    "bos",
    "wrong root",
    "oversize",
    "twin siblings",
    "wide",
    "too many trees",
    "no trees",
]


@pytest.fixture(scope="module")
def expected(mixed: Reference, text: list[int]) -> list[int]:
    return greedy_text(mixed.model, text[:9], COUNT)


@pytest.mark.parametrize("script", SCRIPTS)
def test_T13_strange_trees(mixed: Reference, text: list[int], expected: list[int], script: str) -> None:
    drafter = Puppet(script, expected)
    out = generate(mixed.model, [text[:9]], tree=SHAPE, drafter=drafter, max_new_tokens=COUNT, stop_token_ids=[])[0]
    assert out.token_ids == expected
    assert out.stats.num_draft_errors == 0
    if script in ("oversize", "too many trees"):
        assert out.stats.num_accepted_tokens > 0
        assert out.stats.num_draft_tokens <= 5 * out.stats.num_rounds


@pytest.mark.parametrize("where", ["start", "propose", "observe", "release"])
def test_T13_a_drafter_that_raises(mixed: Reference, text: list[int], expected: list[int], where: str) -> None:
    drafter = Puppet(f"raise in {where}", expected)
    with pytest.warns(UserWarning, match="a drafter's own fault"):
        outs = generate(
            mixed.model, [text[:9]] * 3, tree=SHAPE, drafter=drafter, max_new_tokens=COUNT, stop_token_ids=[]
        )
    assert [out.token_ids for out in outs] == [expected] * 3
    assert all(out.stats.num_draft_errors > 0 for out in outs)


class Lazy(Puppet):
    """A generator: its fault shows only when it is read."""

    def propose(self, request: DraftRequest) -> Iterator[TokenTree]:  # type: ignore[override]
        yield TokenTree.chain([request.roots[0], 5])
        raise RuntimeError("a drafter's own fault")


class Confused(Puppet):
    """No trees at all."""

    def propose(self, request: DraftRequest) -> Sequence[TokenTree]:
        return ["a drafter's own fault"]  # type: ignore[list-item]


@pytest.mark.parametrize("kind", [Lazy, Confused])
def test_T13_what_propose_gives_is_read_with_care(
    mixed: Reference, text: list[int], expected: list[int], kind: type[Puppet]
) -> None:
    with pytest.warns(UserWarning, match="The drafter failed"):
        outs = generate(
            mixed.model, [text[:9]] * 2, tree=SHAPE, drafter=kind("", expected), max_new_tokens=COUNT, stop_token_ids=[]
        )
    assert [out.token_ids for out in outs] == [expected] * 2


class Sampler(Puppet):
    """Sampled drafts of a given fault, from a law that is the same everywhere."""

    def propose_sampled(self, request: DraftRequest, coins: Sequence[Coins]) -> Sequence[DraftTree]:
        root, cap = request.roots[0], request.max_depths[0]
        tokens = {
            "none": [root, 7, 8][: cap + 1],
            "root": [(root + 1) % 48, 7],
            "depth": [root, *[7] * (cap + 1)],
            "id": [root, 48],
        }
        tree = TokenTree.chain(tokens[self.script])
        log_q = torch.full((len(tree), 48), 1 / 48, dtype=torch.float64).log()
        return [DraftTree(tree=tree, proposal=Proposal.SAMPLED, fixed_topology=True, log_q=log_q, replacement=True)]


@pytest.mark.parametrize("verifier", ["leviathan", "block", "traversal"])
@pytest.mark.parametrize("fault", ["none", "root", "depth", "id"])
def test_T13_sampled_trees_are_taken_whole_or_not_at_all(
    mixed: Reference, text: list[int], verifier: str, fault: str
) -> None:
    """They reach the last token too, before which a tree is its root alone."""
    out = generate(
        mixed.model,
        [text[:9]],
        tree="s3_k1_d4",
        drafter=Sampler(fault, []),
        verifier=verifier,
        temperature=1.0,
        max_new_tokens=5,
        stop_token_ids=[],
    )[0]
    assert len(out.token_ids) == 5
    assert out.stats.num_draft_errors == 0
    assert (out.stats.num_draft_tokens > 0) == (fault == "none")
