"""The row plan made on the device is the host's, number for number."""

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressed_spec.device_trees import most_closing
from compressed_spec.kernels import row_plan_triton
from compressed_spec.layout import CacheShape, Compression, StateSpec
from compressed_spec.rows import make_plan
from compressed_spec.tree import TokenTree

CPU = torch.device("cpu")


@settings(max_examples=12, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 16), min_size=1, max_size=4),
    ratios=st.lists(st.integers(1, 9), min_size=1, max_size=2),
    window=st.integers(1, 9),
    topk=st.sampled_from([0, 3, 100]),
    seed=st.integers(0, 2**32),
)
def test_plan_is_the_hosts(sizes: list[int], ratios: list[int], window: int, topk: int, seed: int) -> None:
    rng = random.Random(seed)
    reach = rng.choice([1, 3, 16])
    trees = [
        TokenTree(
            tokens=[rng.randrange(9) for _ in range(size)],
            parents=[-1] + [rng.randrange(max(0, node - reach), node) for node in range(1, size)],
        )
        for size in sizes
    ]
    comps = [
        Compression(ratio=ratio, overlap=bool(i), num_layers=1, entry_dim=2, index_dim=topk and 2, index_topk=topk)
        for i, ratio in enumerate(ratios)
    ]
    spec = StateSpec(
        sliding_window=window,
        num_layers=1,
        head_dim=2,
        compressions=tuple(comps),
        head_layers=0,
        head_shift=0,
        num_streams=1,
        model_dim=1,
        dtype=torch.float32,
        buffer_dtype=torch.float32,
    )
    shape = CacheShape(batch_size=5, max_length=64, max_nodes=80, prefill_chunk=1, max_draft_nodes=1)
    lengths = [rng.choice([0, 1, rng.randrange(48)]) for _ in range(5)]
    rows = rng.sample(range(5), len(sizes))
    slots = rng.sample(range(80), sum(sizes)) if rng.random() < 0.5 else list(range(sum(sizes)))
    plan = make_plan(spec, shape, trees, rows, [lengths[row] for row in rows], CPU, slots=torch.tensor(slots).numpy())

    firsts = [sum(sizes[:i]) for i in range(len(sizes))]
    parents = [-1 if p < 0 else f + p for f, tree in zip(firsts, trees, strict=True) for p in tree.parents]
    depths = [depth for tree in trees for depth in tree.depths]
    deepest = max(depths) + 1 + rng.randrange(3)
    nodes = row_plan_triton.node_table(
        torch.tensor(parents),
        torch.tensor([row for row, size in zip(rows, sizes, strict=True) for _ in range(size)]),
        torch.tensor(lengths),
        torch.tensor(slots),
        deepest,
    )
    assert torch.equal(nodes.start_T, torch.from_numpy(plan.nodes.start_T))
    assert torch.equal(nodes.position_T, plan.position_T)
    assert torch.equal(nodes.parent_stream_T, plan.parent_stream_T)
    same_then_nothing(nodes.ancestors_TA, torch.from_numpy(plan.nodes.ancestors_TA))
    assert torch.equal(row_plan_triton.window_rows(nodes, window, 5), plan.window_rows_TW)

    for comp in comps:
        host = plan.compressions[comp.name]
        table = row_plan_triton.compression_table(
            nodes,
            ratio=comp.ratio,
            span=comp.span,
            per_sequence=comp.num_entries(64),
            batch_size=5,
            num_closing=sum(most_closing(tree.depths, comp.ratio) for tree in trees),
            num_listed=host.num_visible + 2,
        )
        same_then_nothing(table.pool_rows_CS.T, host.pool_rows_CS.T)
        same_then_nothing(table.closing_slot_C[None], host.closing_slot_C[None])
        same_then_nothing(table.entry_position_C[None], host.entry_position_C[None])
        assert torch.equal(table.phase_T, host.phase_T)
        assert torch.equal(table.base_T, host.reach.base_T)
        assert torch.equal(table.count_T, host.reach.count_T)
        assert int(table.visible_T.max()) == host.num_visible
        same_then_nothing(table.extra_rows_TX, host.reach.extra_rows_TX)
        if host.listed_TK is not None:
            same_then_nothing(table.listed_TK, host.listed_TK)
        for first, end, base, count in host.spans:
            assert set(zip(table.base_T[first:end].tolist(), table.count_T[first:end].tolist(), strict=True)) == {
                (base, count)
            }


def same_then_nothing(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same columns first, then -1 in the one that is wider."""
    width = min(actual.shape[1], expected.shape[1])
    assert torch.equal(actual[:, :width], expected[:, :width])
    assert bool((actual[:, width:] == -1).all())
    assert bool((expected[:, width:] == -1).all())
