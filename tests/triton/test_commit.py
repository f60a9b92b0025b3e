"""Commit by path, on the device: the same rows as `Cache.commit`, and nothing else."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressed_spec.cache import Cache, Verification
from compressed_spec.kernels import commit, commit_triton
from compressed_spec.kernels.commit import ENTRIES, RING, SINGLE, Lane, Moves, lane_table
from compressed_spec.layout import Addressing, CacheShape, Compression, StateSpec, pool_specs
from compressed_spec.rows import make_plan
from compressed_spec.tree import TokenTree

KINDS = {Addressing.RING: RING, Addressing.ENTRIES: ENTRIES, Addressing.SINGLE: SINGLE}
CPU = torch.device("cpu")


def spec() -> StateSpec:
    csa = Compression(ratio=4, overlap=True, num_layers=3, entry_dim=6, index_dim=2, index_topk=4)
    hca = Compression(ratio=3, overlap=False, num_layers=1, entry_dim=6)
    return StateSpec(
        sliding_window=5,
        num_layers=4,
        head_dim=6,
        compressions=(csa, hca),
        head_layers=1,
        head_shift=-1,
        num_streams=2,
        model_dim=4,
        dtype=torch.float16,
        buffer_dtype=torch.float32,
    )


def lanes(cache: Cache) -> list[Lane]:
    return [
        Lane(
            kind=KINDS[pool.addressing],
            per_sequence=pool.per_sequence,
            shift=pool.shift,
            ratio=pool.compression.ratio if pool.compression else 1,
            num_persistent=cache.num_persistent(pool.name),
        )
        for pool in pool_specs(cache.spec, cache.shape.max_length)
    ]


def random_tree(rng: random.Random, size: int) -> TokenTree:
    parents = [-1] + [rng.randrange(max(0, node - 2), node) for node in range(1, size)]
    return TokenTree(tokens=[0] * size, parents=parents)


@settings(max_examples=12, deadline=None)
@given(sizes=st.lists(st.integers(1, 14), min_size=1, max_size=3), seed=st.integers(0, 2**32))
def test_commit_is_the_caches(sizes: list[int], seed: int) -> None:
    rng = random.Random(seed)
    trees = [random_tree(rng, size) for size in sizes]
    rows = rng.sample(range(4), len(sizes))
    shape = CacheShape(batch_size=4, max_length=64, max_nodes=64, prefill_chunk=1, max_draft_nodes=1)
    cache = Cache(spec(), shape, CPU)
    for pool in cache.pools.values():
        pool.copy_(torch.randn(pool.shape))
    cache._lengths[:] = [rng.randrange(20) for _ in range(4)]
    slots = rng.sample(range(64), sum(sizes)) if rng.random() < 0.5 else list(range(sum(sizes)))
    starts = [cache.lengths[row] for row in rows]
    plan = make_plan(cache.spec, shape, trees, rows, starts, CPU, slots=torch.tensor(slots).numpy())
    ends = [tree.path_to(rng.randrange(len(tree))) if rng.random() < 0.8 else [] for tree in trees]

    longest = max(map(max, (tree.depths for tree in trees))) + 1
    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    path_BA = torch.tensor(
        [
            [first + node for node in path] + [-1] * (longest - len(path))
            for first, path in zip(firsts, ends, strict=True)
        ]
    )
    arguments = (path_BA, plan.position_T, torch.from_numpy(plan.nodes.sequence_T), torch.tensor(slots))
    table = lane_table(lanes(cache), CPU)
    moves, by_torch = commit_triton.commit_moves(*arguments, table), commit.commit_moves(*arguments, table)
    assert torch.equal(moves.source_MN, by_torch.source_MN)
    kept = moves.source_MN >= 0
    assert torch.equal(moves.target_MN[kept], by_torch.target_MN[kept])

    names = list(cache.pools)
    by_kernel = [cache.pools[name].clone() for name in names]
    commit_triton.commit_rows(commit_triton.pool_table(by_kernel, range(len(names))), moves)
    in_torch = [cache.pools[name].clone() for name in names]
    commit.commit_rows(in_torch, range(len(names)), by_torch)
    verify = Verification(
        trees=tuple(trees), rows=tuple(rows), logits=torch.empty(0), plan=plan, ticket=cache.next_ticket()
    )
    cache.commit(verify, ends)
    for name, ours, theirs in zip(names, by_kernel, in_torch, strict=True):
        assert torch.equal(ours, cache.pools[name]), name
        assert torch.equal(theirs, cache.pools[name]), name


def test_rows_beyond_int32() -> None:
    """A pool of more than 2**31 words: memory that nobody touches costs nothing."""
    pool_LRD = torch.empty((2, 2**21 + 8, 1024), dtype=torch.int32)
    pool_LRD[:, 2**21 + 7] = torch.arange(2048, dtype=torch.int32).view(2, 1024)
    moves = Moves(source_MN=torch.tensor([[-1, 2**21 + 7]]), target_MN=torch.tensor([[0, 2**21 + 1]]))
    commit_triton.commit_rows(commit_triton.pool_table([pool_LRD], [0]), moves)
    assert torch.equal(pool_LRD[:, 2**21 + 1], torch.arange(2048, dtype=torch.int32).view(2, 1024))
