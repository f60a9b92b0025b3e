"""The DSpark head: its rows follow the target's whatever happened, and drafting with it costs speed at worst.

B = batch rows, S = places of a block, V = vocabulary
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from compressed_spec import TokenTree, generate, load_model
from compressed_spec.cache import Cache, Scratch
from compressed_spec.drafting import DraftRequest, DSparkDrafter
from compressed_spec.models.deepseek_v4.names import DraftHeadKind
from compressed_spec.models.deepseek_v4.tiny import make_tiny_checkpoint
from compressed_spec.noise import gumbel_noise, seed_tensor
from compressed_spec.target import DraftBlock, TargetModel
from compressed_spec.testing import (
    Reference,
    assert_near,
    assert_same_state,
    greedy_text,
    live_state,
    poison,
    prefilled,
    random_model,
    raw_bytes,
)
from compressed_spec.testing.ways import WAYS, Way
from compressed_spec.tree import parse_tree
from compressed_spec.verifying import Proposal, draft_coins, make_verifier

BLOCK = 4
COUNT = 24
SHAPES = ["s4_k1_d5", "s9_k1_d10", "s3_k2_d6", "s4_k3_d12", "s6_k4_d9"]
LENGTHS = (1, 2, 6, 8, 9, 13)  # below, at and above the window of 8


@pytest.fixture(scope="module")
def reference() -> Reference:
    """Sliding, CSA and HCA layers, and a DSpark head of two stages that reads the first two layers."""
    return Reference(random_model((0, 4, 8), draft_head=DraftHeadKind.DSPARK, num_draft_layers=2))


@pytest.fixture(scope="module")
def model(reference: Reference) -> TargetModel:
    return reference.model


@pytest.fixture(scope="module")
def prompts(text: list[int]) -> list[list[int]]:
    return [text[:n] for n in LENGTHS]


def request_for(
    cache: Cache,
    rows: Sequence[int],
    tree: str = "s4_k3_d12",
    *,
    roots: Sequence[int] | None = None,
    max_depths: Sequence[int] | None = None,
    temperature: float = 0.0,
    noise: Callable[[int], torch.Tensor] | None = None,
) -> DraftRequest:
    shape = parse_tree(tree)
    assert shape is not None
    return DraftRequest(
        cache=cache,
        rows=tuple(rows),
        roots=tuple(roots or [7] * len(rows)),
        shape=shape,
        max_depths=tuple(max_depths or [shape.num_steps] * len(rows)),
        temperatures=(temperature,) * len(rows),
        noise=noise,
    )


def block_logits(cache: Cache, model: TargetModel, row: int, root: int) -> torch.Tensor:
    """The head's logits `[S, V]` for the block after a row, from lists of rows written out one by one."""
    window, length = cache.spec.sliding_window, cache.lengths[row]
    ring = [row * window + slot if slot < length else -1 for slot in range(window)]
    own = [cache.num_persistent("head_kv") + place for place in range(BLOCK)]
    block = DraftBlock(
        roots_B=torch.tensor([root]),
        position_N=torch.tensor([length + place for place in range(BLOCK)]),
        rows_NW=torch.tensor([ring + own] * BLOCK),
    )
    return model.draft_block(block, Scratch(cache)).logits_BSV[0]


def trees_of(model: TargetModel, request: DraftRequest) -> list[TokenTree]:
    return list(DSparkDrafter(model).propose(request))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: str(way.__name__))
@pytest.mark.parametrize("length", [1, 7, 8, 9, 26])
def test_T38_no_way_leaves_anything_to_catch_up(
    reference: Reference, model: TargetModel, text: list[int], way: Way, length: int
) -> None:
    cache = model.new_cache(batch_size=3, max_length=64, prefill_chunk=11)
    model.prefill(cache, [text[3:20], text[5:9]], rows=[0, 2])
    way(model, cache, 1, text[:length])
    expected = reference.after(text[:length]).cache
    state = live_state(cache, 1)
    assert state["head_kv"].shape[:2] == (2, min(length, 8))
    assert "pending_stream" not in state
    assert_same_state(state, live_state(expected), way.__name__)
    alone = model.new_cache(max_length=64)
    alone.restore(expected.snapshot())
    assert_near(block_logits(cache, model, 1, 7), block_logits(alone, model, 0, 7), "logits of the block")
    cache.check_integrity()


def test_T38_copies_and_earlier_prefixes(model: TargetModel, text: list[int]) -> None:
    """What was kept of a row drafts as the row did, wherever it is put back."""
    cache = prefilled(model, [text[:9], text[20:32], text[40:43]])
    expected = trees_of(model, request_for(cache, [0]))
    kept = cache.snapshot([0])
    model.prefill(cache, [text[9:20]], rows=[0])
    assert trees_of(model, request_for(cache, [0])) != expected
    cache.restore(kept, rows=[2])
    cache.fork(2, 1)
    assert trees_of(model, request_for(cache, [1, 2])) == expected * 2


def test_drafting_writes_nothing_persistent_and_reads_nothing_dead(
    model: TargetModel, prompts: list[list[int]]
) -> None:
    cache = prefilled(model, prompts)
    before = [raw_bytes(cache, row) for row in range(len(prompts))]
    expected = trees_of(model, request_for(cache, range(len(prompts))))
    assert [raw_bytes(cache, row) for row in range(len(prompts))] == before
    poison(cache)
    assert trees_of(model, request_for(cache, range(len(prompts)))) == expected


def test_drafts_do_not_depend_on_the_batch(model: TargetModel, prompts: list[list[int]]) -> None:
    """In any row, any order and any company, and cut to the depth that each row has left."""
    cache = prefilled(model, prompts)
    rows = [4, 1, 5, 0, 3]
    depths = [4, 0, 2, 9, 1]
    together = trees_of(model, request_for(cache, rows, max_depths=depths))
    for row, depth, tree in zip(rows, depths, together, strict=True):
        alone = prefilled(model, [prompts[row]])
        assert tree == trees_of(model, request_for(alone, [0], max_depths=[depth]))[0]
        assert max(tree.depths) <= min(depth, BLOCK)
    assert max(together[3].depths) == BLOCK


def test_a_draft_takes_the_place_of_a_verification(model: TargetModel, text: list[int]) -> None:
    cache = prefilled(model, [text[:9]])
    verify = model.verify(cache, [TokenTree(tokens=[5], parents=[-1])])
    trees_of(model, request_for(cache, [0]))
    with pytest.raises(ValueError, match="verify again before committing"):
        cache.commit(verify, [[0]])


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("shape", ["s4_k2_d9", "s3_k48_d30"])
def test_best_first_under_the_noise_that_will_decide(
    model: TargetModel, text: list[int], shape: str, noisy: bool
) -> None:
    """Against a search that grows one node at a time from the block's logits."""
    cache = prefilled(model, [text[:11]])
    noise = (lambda depth: gumbel_noise(seed_tensor([3]), torch.tensor([11 + depth]), 48)) if noisy else None
    request = request_for(cache, [0], shape, temperature=0.7, noise=noise)
    (tree,) = trees_of(model, request)
    base_SV = block_logits(cache, model, 0, 7).double()

    def children(path: tuple[int, ...], score: float) -> list[tuple[float, tuple[int, ...]]]:
        if len(path) == min(request.shape.num_steps, BLOCK):
            return []
        logits_V = base_SV[len(path)] + model.draft_bias(torch.tensor([path[-1] if path else 7]))[0]
        score_V = torch.log_softmax(logits_V / 0.7, dim=-1)
        if noise is not None:
            score_V = torch.log_softmax(score_V + noise(len(path) + 1)[0], dim=-1)
        best = score_V.topk(request.shape.top_k)
        return [(score + float(s), (*path, int(t))) for s, t in zip(best.values, best.indices, strict=True)]

    frontier = children((), 0.0)
    kept: set[tuple[int, ...]] = set()
    while len(kept) < request.shape.num_nodes - 1:
        best = max(frontier)
        frontier.remove(best)
        kept.add(best[1])
        frontier += children(best[1], best[0])
    assert {tuple(tree.tokens[i] for i in tree.path_to(node)[1:]) for node in range(1, len(tree))} == kept


@pytest.fixture(scope="module")
def three(prompts: list[list[int]]) -> list[list[int]]:
    return prompts[1::2]


@pytest.fixture(scope="module")
def greedy(model: TargetModel, three: list[list[int]]) -> list[list[int]]:
    return [greedy_text(model, prompt, COUNT) for prompt in three]


@pytest.fixture(scope="module")
def sampled(model: TargetModel, three: list[list[int]]) -> list[list[int]]:
    """Plain sampling at temperature 1."""
    outs = generate(model, three, tree="off", temperature=1.0, seed=5, max_new_tokens=COUNT, stop_token_ids=[])
    return [out.token_ids for out in outs]


@pytest.mark.parametrize("shape", SHAPES)
def test_T12_greedy_text_is_that_of_plain_decoding(
    model: TargetModel, three: list[list[int]], greedy: list[list[int]], shape: str
) -> None:
    """Three requests in two rows, so that they join and leave in the middle of the run."""
    outs = generate(model, three, tree=shape, max_new_tokens=COUNT, stop_token_ids=[], batch_size=2)
    assert [out.token_ids for out in outs] == greedy
    assert all(out.stats.num_draft_errors == 0 for out in outs)
    assert sum(out.stats.num_accepted_tokens for out in outs) > 5


@pytest.mark.parametrize("shape", SHAPES)
def test_seed_exact_text_is_that_of_plain_sampling(
    model: TargetModel, three: list[list[int]], sampled: list[list[int]], shape: str
) -> None:
    outs = generate(
        model,
        three,
        tree=shape,
        drafter="dspark",
        temperature=1.0,
        seed=5,
        max_new_tokens=COUNT,
        stop_token_ids=[],
        batch_size=2,
    )
    assert [out.token_ids for out in outs] == sampled
    assert sum(out.stats.num_accepted_tokens for out in outs) > 5


@pytest.mark.parametrize(
    ("verifier", "shape"),
    [("leviathan", "s4_k1_d5"), ("block", "s9_k1_d10"), ("traversal", "s3_k2_d6"), ("traversal", "s9_k2_d14")],
)
def test_verifiers_of_sampled_drafts(model: TargetModel, three: list[list[int]], verifier: str, shape: str) -> None:
    results = [
        generate(
            model,
            three,
            tree=shape,
            verifier=verifier,
            temperature=1.0,
            seed=5,
            max_new_tokens=COUNT,
            stop_token_ids=[],
            batch_size=size,
        )
        for size in (3, 2)
    ]
    assert [out.token_ids for out in results[0]] == [out.token_ids for out in results[1]]
    for out in results[0]:
        assert (len(out.token_ids), out.stats.num_draft_errors) == (COUNT, 0)
    assert sum(out.stats.num_accepted_tokens for out in results[0]) > 5


@pytest.mark.parametrize("shape", ["s4_k1_d5", "s9_k2_d14", "s3_k3_d10"])
def test_sampled_trees_come_with_the_law_that_drew_them(model: TargetModel, text: list[int], shape: str) -> None:
    cache = prefilled(model, [text[:6], text[:11]])
    request = request_for(cache, [1, 0], shape, roots=[7, 9], temperature=0.8, max_depths=[9, 2])
    # Sampled topologies are fixed beforehand: no confidence, however low, takes anything off them.
    drafts = DSparkDrafter(model, confidence_threshold=0.99).propose_sampled(
        request, [draft_coins(1, 11), draft_coins(2, 6)]
    )
    for row, root, cap, draft in zip((1, 0), (7, 9), (9, 2), drafts, strict=True):
        make_verifier("traversal").check(draft)
        assert (draft.proposal, draft.fixed_topology, draft.replacement) == (Proposal.SAMPLED, True, False)
        assert max(draft.tree.depths) == min(cap, request.shape.num_steps, BLOCK)
        assert draft.tree.tokens[0] == root
        base_SV = block_logits(cache, model, row, root).double()
        assert draft.log_q is not None
        for node, depth in enumerate(draft.tree.depths):
            if draft.tree.children(node):
                bias_V = model.draft_bias(torch.tensor([draft.tree.tokens[node]]))[0]
                expected_V = torch.log_softmax((base_SV[depth] + bias_V) / 0.8, dim=-1)
                assert_near(draft.log_q[node], expected_V, f"law after node {node}")
    again = DSparkDrafter(model).propose_sampled(request, [draft_coins(1, 11), draft_coins(3, 6)])
    assert again[0].tree == drafts[0].tree
    assert again[1].tree.parents == drafts[1].tree.parents


def test_confidence_closes_nodes_and_gives_their_room_to_others(model: TargetModel, text: list[int]) -> None:
    cache = prefilled(model, [text[:9]])
    request = request_for(cache, [0], "s4_k2_d9")
    free = DSparkDrafter(model).propose(request)[0]
    hidden_BSD = model.draft_block(block_of(cache, 7), Scratch(cache)).hidden_BSD

    def confidence(tree: TokenTree, node: int) -> float:
        hidden_ND = hidden_BSD[:, tree.depths[node]]
        return float(model.draft_confidence(hidden_ND, torch.tensor([tree.tokens[node]])).sigmoid())

    inner = sorted(confidence(free, node) for node in range(len(free)) if free.children(node))
    for threshold in (inner[0] + 1e-9, inner[-1] - 1e-9, inner[-1] + 1e-9):
        cut = DSparkDrafter(model, confidence_threshold=threshold).propose(request)[0]
        assert cut != free
        assert all(confidence(cut, node) >= threshold for node in range(len(cut)) if cut.children(node))
    alone = DSparkDrafter(model, confidence_threshold=confidence(free, 0) + 1e-9).propose(request)[0]
    assert len(alone) == 1


def block_of(cache: Cache, root: int) -> DraftBlock:
    """The block after the only row of a cache whose window is full."""
    own = [cache.num_persistent("head_kv") + place for place in range(BLOCK)]
    return DraftBlock(
        roots_B=torch.tensor([root]),
        position_N=torch.arange(cache.lengths[0], cache.lengths[0] + BLOCK),
        rows_NW=torch.tensor([[*range(cache.spec.sliding_window), *own]] * BLOCK),
    )


def test_T36_refusals(model: TargetModel, text: list[int]) -> None:
    for threshold in (-0.1, 1.0):
        with pytest.raises(ValueError, match="confidence_threshold is a probability below 1"):
            DSparkDrafter(model, confidence_threshold=threshold)
    cache = model.new_cache(max_length=20, max_draft_nodes=BLOCK - 1)
    model.prefill(cache, [text[:3]])
    with pytest.raises(ValueError, match="needs 4 draft nodes, more than the cache's 3"):
        trees_of(model, request_for(cache, [0]))


def test_T24_a_checkpoint_in_the_real_layout_drafts_what_is_accepted(tmp_path: Path) -> None:
    """FP8 and packed FP4, three stages."""
    model = load_model(make_tiny_checkpoint(tmp_path, draft_head="dspark"), progress=False)
    prompts = [[5, 9, 30], [17, 200, 3, 8, 40, 77, 12]]
    plain, drafted = (
        generate(model, prompts, tree=tree, max_new_tokens=16, stop_token_ids=[]) for tree in ("off", "s4_k2_d8")
    )
    assert [out.token_ids for out in drafted] == [out.token_ids for out in plain]
    assert sum(out.stats.num_accepted_tokens for out in drafted) >= 8
