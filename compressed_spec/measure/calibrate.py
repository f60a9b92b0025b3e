"""Measure a drafter's acceptance by depth and rank, and fit its scores, in real rounds of a model.

B = batch rows, F = nodes of a level that have children, V = vocabulary, G = candidate temperatures, K = children
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from compressed_spec.drafting import Drafter, make_drafter
from compressed_spec.drafting.base import DraftPlan
from compressed_spec.drafting.sampled import fixed_topology
from compressed_spec.drafting.scoring import Scoring
from compressed_spec.generate import collect, make_decoder, make_requests
from compressed_spec.sampling_params import SamplingParams
from compressed_spec.shaping.base import RoundOutcome, RoundState
from compressed_spec.shaping.calibration import Calibration
from compressed_spec.target import TargetModel
from compressed_spec.topology import Topology
from compressed_spec.tree import TokenTree, TreeShape

TEMPERATURES = tuple(round(0.3 + 0.05 * i, 2) for i in range(25))  # 0.3 .. 1.5
CALIBRATION_SHAPE = TreeShape(num_steps=4, top_k=4, num_nodes=24)
SMOOTHING = 1.0  # expected matches that a correction leans on


def calibrate(
    model: TargetModel,
    prompts_ids: Sequence[Sequence[int]],
    *,
    drafter: str | Drafter = "auto",
    shape: TreeShape = CALIBRATION_SHAPE,
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 8,
) -> Calibration:
    """Decode prompts with wide trees of one fixed topology and report which of their nodes were the target's.

    shape: of the widest and deepest tree to measure; use more nodes than the trees to be built from the result.
    temperature: of sampling, with coupled noise above 0. A drafter that steps a head has its score temperature and its
    corrections fitted too, by maximum likelihood of what was accepted.
    Raises ValueError as `generate` does, or if no draft was verified.
    """
    helper = make_drafter(drafter, model)
    recorder = _Recorder(shape)
    requests = make_requests(
        model,
        prompts_ids,
        SamplingParams(temperature=temperature),
        max_new_tokens=max_new_tokens,
        seed=seed,
        stop_token_ids=[],
    )
    if not requests:
        raise ValueError("Calibration needs at least one prompt.")
    decoder = make_decoder(
        model, requests, tree=recorder, drafter=helper, verifier="auto", batch_size=min(batch_size, len(requests))
    )
    collect(decoder, len(requests))
    if not recorder.counts:
        raise ValueError("No draft was verified, so there is nothing to calibrate: give longer prompts or texts.")
    name = drafter if isinstance(drafter, str) else type(drafter).__name__
    return recorder.calibration(temperature, name)


@dataclass(slots=True, kw_only=True)
class _Count:
    tried: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Observation:
    """A visited node's children: their scores at every candidate temperature, and which was the target's, or None."""

    depth: int
    scores_GK: torch.Tensor
    taken: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _RecordingScoring(Scoring):
    """Scores as ever, and keeps `[B, F, G, K]` of each level of a round."""

    levels: list[torch.Tensor] = field(default_factory=list, compare=False)
    count: int

    def edges(
        self, log_q_BFV: torch.Tensor, noise_BV: torch.Tensor | None, temperatures: Sequence[float]
    ) -> torch.Tensor:
        scores_BFV = Scoring.edges(self, log_q_BFV, noise_BV, temperatures)
        top_BFK = scores_BFV.topk(min(self.count, scores_BFV.shape[-1]), dim=-1).values
        candidates = []
        for temperature in TEMPERATURES:
            rest_BF1 = torch.logsumexp(scores_BFV / temperature, dim=-1, keepdim=True)
            candidates.append(top_BFK / temperature - rest_BF1)
        self.levels.append(torch.stack(candidates, dim=2).cpu())
        return scores_BFV


class _Recorder:
    """Asks for one topology every round and keeps what became of it."""

    def __init__(self, shape: TreeShape) -> None:
        self._topology: Topology = fixed_topology(DraftPlan(shape=shape))
        self._scoring = _RecordingScoring(count=self._topology.shape.top_k)
        self.counts: dict[tuple[int, int], _Count] = defaultdict(_Count)
        self._observations: list[_Observation] = []

    @property
    def largest(self) -> DraftPlan:
        return DraftPlan(shape=self._topology.shape, topology=self._topology, scoring=self._scoring)

    def plan(self, state: RoundState) -> DraftPlan | None:
        self._scoring.levels.clear()
        return self.largest

    def prune(self, state: RoundState, trees: Sequence[TokenTree]) -> Sequence[TokenTree]:
        return trees

    def observe(self, outcome: RoundOutcome) -> None:
        levels = self._scoring.levels
        for row, (tree, path) in enumerate(zip(outcome.trees, outcome.paths, strict=True)):
            for depth, (node, following) in enumerate(zip(path, [*path[1:], -1], strict=True), start=1):
                children = tree.children(node)
                if not children:
                    continue
                for rank, child in enumerate(children):
                    self.counts[depth, rank].tried += 1
                    self.counts[depth, rank].accepted += child == following
                taken = children.index(following) if following in children else None
                if len(levels) >= depth and tree.parents == self._topology.parents[: len(tree)]:
                    slot = self._topology.expanded[depth - 1].index(node)
                    scores_GK = levels[depth - 1][row, slot, :, : len(children)]
                    self._observations.append(_Observation(depth=depth, scores_GK=scores_GK, taken=taken))

    def calibration(self, temperature: float, drafter: str) -> Calibration:
        deepest = max(depth for depth, _ in self.counts)
        table: list[list[_Count]] = []
        for depth in range(1, deepest + 1):
            widest = max(rank for d, rank in self.counts if d == depth)
            table.append([self.counts[depth, rank] for rank in range(widest + 1)])
        best = self._fitted_temperature()
        return Calibration(
            acceptance=tuple(tuple(cell.accepted / max(cell.tried, 1) for cell in row) for row in table),
            num_tried=tuple(tuple(cell.tried for cell in row) for row in table),
            temperature=temperature,
            score_temperature=None if best is None else TEMPERATURES[best],
            log_bias=() if best is None else self._corrections(best, [len(row) for row in table]),
            drafter=drafter,
        )

    def _fitted_temperature(self) -> int | None:
        """Index of the candidate under which what was taken, or that nothing was, is most likely."""
        if not self._observations:
            return None
        likelihood_G = torch.zeros(len(TEMPERATURES), dtype=torch.float64)
        for one in self._observations:
            if one.taken is None:
                likelihood_G += torch.log((1 - one.scores_GK.exp().sum(dim=-1)).clamp(min=1e-6))
            else:
                likelihood_G += one.scores_GK[:, one.taken].clamp(min=math.log(1e-6))
        return int(likelihood_G.argmax())

    def _corrections(self, best: int, widths: Sequence[int]) -> tuple[tuple[float, ...], ...]:
        expected: dict[tuple[int, int], float] = defaultdict(float)
        accepted: dict[tuple[int, int], int] = defaultdict(int)
        for one in self._observations:
            for rank, score in enumerate(one.scores_GK[best].tolist()):
                expected[one.depth, rank] += math.exp(score)
                accepted[one.depth, rank] += rank == one.taken
        return tuple(
            tuple(
                math.log((accepted[depth, rank] + SMOOTHING) / (expected[depth, rank] + SMOOTHING))
                for rank in range(width)
            )
            for depth, width in enumerate(widths, start=1)
        )
