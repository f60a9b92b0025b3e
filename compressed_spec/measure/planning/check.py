"""Predicted seconds against those of real rounds of a model on this machine."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from compressed_spec.cache import Cache
from compressed_spec.drafting import make_drafter
from compressed_spec.drafting.base import Drafter, DraftPlan, DraftRequest
from compressed_spec.drafting.sampled import fixed_topology
from compressed_spec.measure.planning.roofline import Roofline
from compressed_spec.measure.timing import fastest
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.target import TargetModel
from compressed_spec.tree import TokenTree, TreeShape

BATCH_SIZES = (1, 4)
CONTEXTS = (64, 512)
SHAPES = tuple(
    TreeShape(num_steps=n, top_k=k, num_nodes=d) for n, k, d in ((1, 1, 2), (3, 1, 4), (3, 2, 6), (4, 2, 8), (4, 3, 16))
)
PASSES, REPEATS = 4, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedStep:
    """One stage of a round: "verify" (with its sampling and commit) or "draft"; seconds. num_nodes: of all rows."""

    stage: str
    num_rows: int
    num_nodes: int
    context: int
    predicted: float
    measured: float


def median_error(steps: Sequence[CheckedStep]) -> float:
    """The median of |predicted / measured - 1|."""
    return statistics.median(abs(step.predicted / step.measured - 1) for step in steps)


@torch.no_grad()
def check_steps(model: DeepseekV4, roofline: Callable[[int], Roofline], *, passes: int = PASSES) -> list[CheckedStep]:
    """Time verification and drafting of several trees, batches and contexts, and set them beside the prediction.

    roofline: made for a largest batch size, before anything of the model is timed. passes: over the whole grid, far
    apart in time, of which the fastest counts: what disturbs a machine only ever makes it slower, and passes.
    """
    predicted, drafter = roofline(max(BATCH_SIZES)), make_drafter("auto", model)
    most = max(shape.num_nodes for shape in SHAPES)
    cache = model.new_cache(
        batch_size=max(BATCH_SIZES),
        max_length=max(CONTEXTS) + most,
        max_nodes=max(BATCH_SIZES) * most,
        max_draft_nodes=max(BATCH_SIZES) * max(shape.num_draft_nodes for shape in SHAPES),
    )
    grids = [_one_pass(model, drafter, cache, predicted) for _ in range(passes)]
    return [min(steps, key=lambda step: step.measured) for steps in zip(*grids, strict=True)]


def _one_pass(model: DeepseekV4, drafter: Drafter, cache: Cache, predicted: Roofline) -> list[CheckedStep]:
    steps = []
    for context in CONTEXTS:
        text = [(7 * i + 3) % model.vocab_size for i in range(context)]
        for row in range(max(BATCH_SIZES)):
            cache.release(row)
        model.prefill(cache, [text] * max(BATCH_SIZES))
        for num_rows in BATCH_SIZES:
            for nodes in sorted({1, *(shape.num_nodes for shape in SHAPES)}):
                steps.append(_verify(model, cache, predicted, num_rows, nodes, context))
            for shape in SHAPES:
                steps.append(_draft(drafter, cache, predicted, num_rows, shape, context, text))
    return steps


def _verify(
    model: TargetModel, cache: Cache, predicted: Roofline, num_rows: int, nodes: int, context: int
) -> CheckedStep:
    deepest = fixed_topology(DraftPlan(shape=SHAPES[-1])).parents
    tokens = [(5 * i + 1) % model.vocab_size for i in range(nodes)]
    trees = [TokenTree(tokens=tokens, parents=deepest[:nodes])] * num_rows

    def action() -> None:
        verify = model.verify(cache, trees)
        torch.argmax(verify.logits, dim=-1).tolist()
        cache.commit(verify, [[]] * num_rows)

    return CheckedStep(
        stage="verify",
        num_rows=num_rows,
        num_nodes=num_rows * nodes,
        context=context,
        predicted=sum(predicted.verify(num_rows, num_rows * nodes, context).values()),
        measured=fastest(action, REPEATS),
    )


def _draft(
    drafter: Drafter,
    cache: Cache,
    predicted: Roofline,
    num_rows: int,
    shape: TreeShape,
    context: int,
    text: Sequence[int],
) -> CheckedStep:
    for row in range(num_rows):
        drafter.start(row, [*text, text[0]])
    request = DraftRequest(
        cache=cache,
        rows=tuple(range(num_rows)),
        roots=(text[0],) * num_rows,
        shape=shape,
        max_depths=(shape.num_steps,) * num_rows,
        temperatures=(0.0,) * num_rows,
        noise=None,
    )
    measured = fastest(partial(drafter.propose, request), REPEATS)
    for row in range(num_rows):
        drafter.release(row)
    widths = [1, *[shape.top_k] * (shape.num_steps - 1)]
    return CheckedStep(
        stage="draft",
        num_rows=num_rows,
        num_nodes=num_rows * sum(widths),
        context=context,
        predicted=sum(predicted.draft(num_rows, widths, context).values()),
        measured=measured,
    )
