"""For each batch and context: how long a round takes by nodes, what it emits, and the tree that pays most."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from compressed_spec.kernels.numerics import numerics_named
from compressed_spec.layout import CacheShape
from compressed_spec.measure.planning.roofline import PlannedModel, Roofline
from compressed_spec.measure.planning.speedup import Round
from compressed_spec.measure.planning.storage import Part
from compressed_spec.models.deepseek_v4.modules import Precision
from compressed_spec.models.deepseek_v4.state import state_spec
from compressed_spec.shaping.optimal import Acceptance, expected_length, optimal_topology
from compressed_spec.target import DEFAULT_CHUNK
from compressed_spec.topology import Topology

_KV_DTYPES = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A topology and what it is predicted to bring.

    parents: as `static:FILE` reads them. tokens: a round and row, bonus counted. Speeds are the batch's.
    """

    name: str
    parents: tuple[int, ...]
    num_nodes: int
    tokens: float
    draft_seconds: float
    verify_seconds: float
    seconds: float
    tokens_per_second: float
    speedup: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetPlan:
    """The best topology of `num_nodes` nodes (fewer if acceptance tells of no more), and the chain of that many."""

    num_nodes: int
    tree: Candidate
    chain: Candidate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PointPlan:
    """One batch size and context.

    memory_bytes: of weights and cache on each device, for the largest budget. fits: whether there is room; otherwise
    nothing is recommended. best: None where plain decoding is the fastest. plain_parts, best_parts: seconds of a plain
    step, and of the best round's verification and drafting, by part.
    """

    batch_size: int
    context: int
    memory_bytes: int
    fits: bool
    plain_seconds: float
    plain_parts: Mapping[Part, float]
    budgets: tuple[BudgetPlan, ...]
    best: Candidate | None
    best_parts: Mapping[Part, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Result of `make_plan`; `dataclasses.asdict` makes it JSON. weight_bytes: on each device."""

    device: str
    num_ranks: int
    draft_head: str
    weight_bytes: int
    kv_bytes_per_token: float
    points: tuple[PointPlan, ...]


def make_plan(
    roofline: Roofline,
    acceptance: Acceptance,
    *,
    batch_sizes: Sequence[int],
    contexts: Sequence[int],
    budgets: Sequence[int],
    free_drafts: bool = False,
) -> Plan:
    """Weigh topologies of each budget (nodes, root counted) against plain decoding.

    acceptance: as `optimal_topology` takes it, measured with the drafter to come. free_drafts: drafting takes no time,
    as with n-grams. Raises ValueError for a context beyond the model's positions, a budget below 2, or an acceptance
    table that is none.
    """
    model = roofline.model
    for context in contexts:
        if not 1 <= context <= model.config.max_position_embeddings:
            raise ValueError(
                f"A context of {context} tokens is not within the model's {model.config.max_position_embeddings} "
                "positions: change --context."
            )
    trees = {budget: _topologies(acceptance, budget) for budget in budgets}
    return Plan(
        device=roofline.device.name,
        num_ranks=model.num_ranks,
        draft_head=model.draft_head.value,
        weight_bytes=model.weight_bytes,
        kv_bytes_per_token=kv_bytes_per_token(model),
        points=tuple(
            _point(roofline, acceptance, trees, batch_size, context, free_drafts)
            for context in contexts
            for batch_size in batch_sizes
        ),
    )


def _topologies(acceptance: Acceptance, budget: int) -> list[Topology]:
    """The longest accepted topology of a budget for each depth limit (fewer steps draft faster); all of one size."""
    found = {optimal_topology(acceptance[:steps], budget).parents for steps in range(1, len(acceptance) + 1)}
    most = max(map(len, found))
    return [Topology(parents=parents) for parents in sorted(found) if len(parents) == most]


def _point(
    roofline: Roofline,
    acceptance: Acceptance,
    trees: Mapping[int, Sequence[Topology]],
    batch_size: int,
    context: int,
    free_drafts: bool,
) -> PointPlan:
    plain_parts = roofline.verify(batch_size, batch_size, context)
    plain = math.fsum(plain_parts.values())

    def parts(topology: Topology) -> tuple[Mapping[Part, float], Mapping[Part, float]]:
        widths = [] if free_drafts else [len(level) for level in topology.expanded]
        verify = roofline.verify(batch_size, batch_size * len(topology), context)
        return verify, roofline.draft(batch_size, widths, context)

    def weigh(topology: Topology) -> Candidate:
        verify, draft = parts(topology)
        one = Round(
            tokens=expected_length(topology, acceptance),
            draft=math.fsum(draft.values()),
            verify=math.fsum(verify.values()),
        )
        return Candidate(
            name=str(topology.shape),
            parents=topology.parents,
            num_nodes=len(topology),
            tokens=one.tokens,
            draft_seconds=one.draft,
            verify_seconds=one.verify,
            seconds=one.seconds,
            tokens_per_second=batch_size / one.seconds_per_token,
            speedup=one.speedup(plain),
        )

    budgets = []
    for budget, topologies in trees.items():
        chain = Topology(parents=tuple(range(-1, budget - 1))) if budget - 1 <= len(acceptance) else None
        budgets.append(
            BudgetPlan(
                num_nodes=budget,
                tree=max(map(weigh, topologies), key=lambda one: one.tokens_per_second),
                chain=None if chain is None else weigh(chain),
            )
        )
    candidates = [one for budget in budgets for one in (budget.tree, budget.chain) if one is not None]
    best = max(candidates, key=lambda one: (one.tokens_per_second, -one.num_nodes))
    memory = roofline.model.weight_bytes + cache_bytes(roofline.model, batch_size, context, max(trees))
    fits = memory <= roofline.device.memory_bytes
    wins = fits and best.speedup > 1
    spent: dict[Part, float] = {}
    for some in parts(Topology(parents=best.parents)) if wins else ():
        spent |= {part: spent.get(part, 0.0) + seconds for part, seconds in some.items()}
    return PointPlan(
        batch_size=batch_size,
        context=context,
        memory_bytes=memory,
        fits=fits,
        plain_seconds=plain,
        plain_parts=plain_parts,
        budgets=tuple(budgets),
        best=best if wins else None,
        best_parts=spent,
    )


def cache_bytes(model: PlannedModel, batch_size: int, max_length: int, num_nodes: int) -> int:
    """Of the cache on each rank (history is not divided), its scratch rows included."""
    dtype = _KV_DTYPES[model.kv_bytes]
    spec = state_spec(
        model.config,
        draft_head=model.draft_head,
        num_draft_layers=model.num_draft_layers,
        precision=Precision(dtype=dtype, numerics=numerics_named("fast")),
    )
    nodes = batch_size * num_nodes
    shape = CacheShape(
        batch_size=batch_size,
        max_length=max_length,
        max_nodes=nodes,
        prefill_chunk=DEFAULT_CHUNK,
        max_draft_nodes=nodes,
    )
    return shape.nbytes(spec)


def kv_bytes_per_token(model: PlannedModel) -> float:
    """Bytes that a sequence grows by each token, on average, on every rank."""
    span = math.lcm(*(layer.ratio for layer in model.config.layers if layer.ratio), 1)
    return (cache_bytes(model, 1, 2 * span, 1) - cache_bytes(model, 1, span, 1)) / span
