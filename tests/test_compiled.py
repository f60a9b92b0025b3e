"""Compiled pieces, and layers in their form for few nodes: the same function as the plain ones."""

from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from compressed_spec import generate, load_model
from compressed_spec.kernels.commit import Moves, commit_rows
from compressed_spec.models.deepseek_v4.few_forward import FewForward, Limits
from compressed_spec.models.deepseek_v4.load import DEMO
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.names import DraftHeadKind
from compressed_spec.models.deepseek_v4.pieces import RowMoves
from compressed_spec.testing.models import random_model
from compressed_spec.tree import TokenTree

TREES = (
    TokenTree(tokens=[5], parents=[-1]),
    TokenTree(tokens=[5, 6, 7, 8, 9], parents=[-1, 0, 0, 1, 3]),
    TokenTree.chain([3, 4, 5, 6, 7, 8]),
)


def logits_of(model: DeepseekV4, lengths: Sequence[int], num_rounds: int) -> torch.Tensor:
    """Logits of rounds with other trees each, on ragged rows; every path is the tree's first."""
    random = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, model.vocab_size, (length,), generator=random).tolist() for length in lengths]
    cache = model.new_cache(batch_size=len(prompts), max_length=max(lengths) + 8 * num_rounds, max_nodes=32)
    seen = [model.prefill(cache, prompts)]
    for number in range(num_rounds):
        trees = [TREES[(number + row) % len(TREES)] for row in range(len(prompts))]
        verify = model.verify(cache, trees)
        cache.commit(verify, [[0, 1] if len(tree) > 1 else [0] for tree in trees])
        seen.append(verify.logits)
    cache.check_integrity()
    return torch.cat(seen)


@pytest.mark.parametrize("lengths", [(3,), (9, 40), (1, 2, 70)])
def test_few_nodes_in_one_function(lengths: tuple[int, ...]) -> None:
    model = random_model(seed=3)
    plain = logits_of(model, lengths, 12)
    model.few = FewForward(model, Limits(nodes=32, keys=2**16))
    torch.testing.assert_close(logits_of(model, lengths, 12), plain, rtol=1e-4, atol=1e-4 * plain.abs().max().item())


@pytest.mark.parametrize("draft_head", [DraftHeadKind.MTP, DraftHeadKind.DSPARK])
def test_drafts_of_few_nodes(draft_head: DraftHeadKind) -> None:
    model = random_model(seed=4, draft_head=draft_head, num_draft_layers=2 if draft_head is DraftHeadKind.DSPARK else 1)
    prompts = [[5, 9, 2, 40] * 12, [7, 8, 9]]
    plain = generate(model, prompts, tree="s3_k2_d6", max_new_tokens=24)
    model.few = FewForward(model, Limits(nodes=256, keys=2**16))
    few = generate(model, prompts, tree="s3_k2_d6", max_new_tokens=24)
    assert [out.token_ids for out in few] == [out.token_ids for out in plain]
    assert [out.stats.num_accepted_tokens for out in few] == [out.stats.num_accepted_tokens for out in plain]
    assert {"block_hidden", "head_step"} & {name for name, _, _ in model.few.pieces}


@given(data=st.data(), num_moves=st.integers(0, 6), lane_of=st.lists(st.integers(0, 2), min_size=1, max_size=5))
def test_rows_of_a_commit_move_in_one_function(data: st.DataObject, num_moves: int, lane_of: list[int]) -> None:
    """Scratch rows 20 .. onto persistent ones, none twice; -1 moves nothing."""
    sources = st.lists(st.integers(20, 29) | st.just(-1), min_size=num_moves, max_size=num_moves)
    targets = st.permutations(range(20)).map(lambda rows: rows[:num_moves])
    moves = Moves(
        source_MN=torch.tensor([data.draw(sources) for _ in range(3)], dtype=torch.int64).view(3, num_moves),
        target_MN=torch.tensor([data.draw(targets) for _ in range(3)], dtype=torch.int64).view(3, num_moves),
    )
    pools = [torch.randn(1 + i % 2, 30 + i, 2 + i) for i in range(len(lane_of))]
    expected = [pool.clone() for pool in pools]
    commit_rows(expected, lane_of, moves)
    RowMoves()(moves.source_MN[lane_of], moves.target_MN[lane_of], *pools)
    for pool, wanted in zip(pools, expected, strict=True):
        assert torch.equal(pool, wanted)


def test_what_autograd_follows_is_not_taken() -> None:
    model = random_model(seed=3).requires_grad_()
    expected, _ = model.score([[5, 6, 7, 8]])
    model.few = FewForward(model, Limits(nodes=32, keys=2**16))
    actual, _ = model.score([[5, 6, 7, 8]])
    assert torch.equal(actual, expected)
    assert actual.requires_grad


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_compiled_demo_equals_the_plain_one() -> None:
    plain, compiled = load_model(DEMO, progress=False), load_model(DEMO, progress=False, compile=True)
    for lengths in ((3,), (500,), (9, 140, 300), (1, 2)):
        expected = logits_of(plain, lengths, 12)
        actual = logits_of(compiled, lengths, 12)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    prompts = [list(range(20, 60)), [0, 77, 5], list(range(90, 400))]
    for tree, drafter in (("off", "auto"), ("s3_k2_d6", "auto"), ("s3_k1_d4", "early-exit"), ("s4_k3_d16", "ngram")):
        wanted = generate(plain, prompts, tree=tree, drafter=drafter, max_new_tokens=48)
        outs = generate(compiled, prompts, tree=tree, drafter=drafter, max_new_tokens=48)
        assert [out.token_ids for out in outs] == [out.token_ids for out in wanted], tree
        # Wrong drafts would cost speed alone.
        accepted = [out.stats.num_accepted_tokens for out in outs]
        assert accepted == [out.stats.num_accepted_tokens for out in wanted], tree


def test_compiling_is_refused_where_it_cannot_be() -> None:
    with pytest.raises(ValueError, match="fast numerics"):
        load_model(DEMO, compile=True, numerics="invariant")
    with pytest.raises(ValueError, match="on a CPU"):
        load_model(DEMO, compile=True, device="meta")
