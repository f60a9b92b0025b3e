"""The start-up profile behind `auto`: how long verifying and drafting take here, by nodes, batch and context."""

import time
from collections.abc import Callable
from functools import partial

import torch

from compressed_spec.cache import Cache
from compressed_spec.drafting.base import Drafter, DraftPlan, DraftRequest
from compressed_spec.drafting.fit import num_target_nodes
from compressed_spec.drafting.sampled import fixed_topology
from compressed_spec.shaping.costs import CostModel, DraftSample, VerifySample, fit_costs
from compressed_spec.target import TargetModel
from compressed_spec.topology import Topology
from compressed_spec.tree import TokenTree, TreeShape

SHORT_CONTEXT, LONG_CONTEXT = 8, 512
NODES_PER_ROW = (1, 4, 16)
REPEATS = 2  # the fastest counts; the first also warms up


def profile_costs(
    model: TargetModel,
    drafter: Drafter | None,
    *,
    batch_size: int,
    max_length: int,
    shape: TreeShape,
    clock: Callable[[], float] = time.perf_counter,
) -> CostModel:
    """Time trees of up to `shape` for one row and for `batch_size` rows, after a short and a long context.

    drafter: one that serves no request, since it is started and released on made-up texts; None leaves drafting at no
    cost. max_length: the longest text to come, which limits the long context (at most 512 tokens). Runs on a cache of
    its own. What a drafter raises here costs its part of the profile, no more.
    """
    contexts = sorted({SHORT_CONTEXT, max(min(max_length, LONG_CONTEXT), SHORT_CONTEXT)})
    topology = fixed_topology(DraftPlan(shape=shape))
    cache = model.new_cache(
        batch_size=batch_size,
        max_length=min(contexts[-1] + shape.num_nodes + 1, model.max_position_embeddings),
        max_nodes=batch_size * num_target_nodes(drafter, DraftPlan(shape=shape)),
        max_draft_nodes=batch_size * max(shape.num_draft_nodes, model.draft_block_size),
    )
    verify: list[VerifySample] = []
    draft: list[DraftSample] = []
    for context in contexts:
        context = min(context, cache.shape.max_length - shape.num_nodes)
        text = [(7 * i + 3) % model.vocab_size for i in range(context)]
        for row in range(batch_size):
            cache.release(row)
        model.prefill(cache, [text] * batch_size)
        for num_rows in sorted({1, batch_size}):
            for count in sorted({n for n in NODES_PER_ROW if n < shape.num_nodes} | {shape.num_nodes}):
                verify.append(_verify(model, cache, topology, num_rows, count, context, clock))
            if drafter is not None and context == contexts[0]:
                draft += _draft(drafter, cache, num_rows, text, shape, clock)
    return fit_costs(verify, draft, model.num_experts)


def _fastest(action: Callable[[], object], clock: Callable[[], float]) -> float:
    seconds = []
    for _ in range(REPEATS):
        begin = clock()
        action()
        seconds.append(clock() - begin)
    return max(min(seconds), 1e-9)


def _verify(
    model: TargetModel,
    cache: Cache,
    topology: Topology,
    num_rows: int,
    count: int,
    context: int,
    clock: Callable[[], float],
) -> VerifySample:
    tokens = [(5 * i + 1) % model.vocab_size for i in range(count)]
    trees = [TokenTree(tokens=tokens, parents=topology.parents[:count])] * num_rows

    def round_without_draft() -> None:
        verify = model.verify(cache, trees)
        torch.argmax(verify.logits, dim=-1).tolist()
        cache.commit(verify, [[]] * num_rows)

    seconds = _fastest(round_without_draft, clock)
    return VerifySample(num_rows=num_rows, num_nodes=num_rows * count, context=context, seconds=seconds)


def _draft(
    drafter: Drafter, cache: Cache, num_rows: int, text: list[int], shape: TreeShape, clock: Callable[[], float]
) -> list[DraftSample]:
    samples = []
    try:
        for row in range(num_rows):
            drafter.start(row, [*text, text[0]])
        for steps, top_k in sorted({(1, 1), (shape.num_steps, 1), (shape.num_steps, shape.top_k)}):
            request = DraftRequest(
                cache=cache,
                rows=tuple(range(num_rows)),
                roots=(text[0],) * num_rows,
                shape=TreeShape(num_steps=steps, top_k=top_k, num_nodes=shape.num_nodes),
                max_depths=(steps,) * num_rows,
                temperatures=(0.0,) * num_rows,
                noise=None,
            )
            seconds = _fastest(partial(drafter.propose, request), clock)
            samples.append(DraftSample(num_rows=num_rows, num_steps=steps, top_k=top_k, seconds=seconds))
        for row in range(num_rows):
            drafter.release(row)
    except Exception:  # its faults are counted, and warned of, when it drafts for a request
        return []
    return samples
