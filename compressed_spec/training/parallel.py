"""Gradients of one update from several processes of one thread each, which share the parameters.

Process i of n takes micro batches i, i + n, ... of an update; sums are made in that order, so a run does not depend on
who is faster.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import torch
import torch.multiprocessing as mp

from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.training.corpus import Encoded, batches
from compressed_spec.training.dense import DenseForward
from compressed_spec.training.losses import LossFunction, Stage
from compressed_spec.training.quantize import straight_through
from compressed_spec.training.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What one process adds to an update: sums of losses and expert loads, and which parameters got a gradient."""

    parts: dict[str, float]
    loads: dict[str, list[int]]
    trained: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Process `index` of `count`, after `consumed` micro batches; compile: whether torch.compile fuses its forward."""

    index: int
    count: int
    consumed: int
    compile: bool


class Replica:
    """Forward and backward of one process's micro batches; gradients add up in the parameters."""

    def __init__(self, model: DeepseekV4, documents: Sequence[Encoded], recipe: Recipe, place: Place) -> None:
        self._parameters, self._place = dict(model.named_parameters()), place
        self._forward = DenseForward(model, recipe.length, compile=place.compile)
        self._losses = LossFunction(self._forward, recipe.losses, compile=place.compile)
        self._batches = batches(
            documents,
            rows=recipe.rows,
            length=recipe.length,
            extra=1 + len(recipe.losses.draft),
            prompt_weight=recipe.prompt_weight,
            seed=recipe.seed,
            skip=place.consumed,
        )

    def gradients(self, stage: Stage) -> Report:
        parts: dict[str, float] = {}
        loads: dict[str, list[int]] = {}
        self._forward.weights.update(straight_through(self._parameters, quantize=stage.quantize))
        count = stage.micro_batches
        for number in range(count):
            batch = next(self._batches)
            if number % self._place.count != self._place.index:
                continue
            losses = self._losses(batch, stage)
            (losses.total / count).backward()
            for name, value in losses.parts.items():
                parts[name] = parts.get(name, 0.0) + value / count
            for name, load in losses.passed.loads.items():
                before = loads.get(name, [0] * len(load))
                loads[name] = [a + b for a, b in zip(before, load.tolist(), strict=True)]
        trained = frozenset(name for name, p in self._parameters.items() if p.grad is not None)
        return Report(parts=parts, loads=loads, trained=trained)


def _serve(
    model: DeepseekV4,
    documents: Sequence[Encoded],
    recipe: Recipe,
    place: Place,
    sums: dict[str, torch.Tensor],
    pipe: Connection,
) -> None:
    """A helper process: gradients for every stage from the pipe, until None comes or the main process ends."""
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("medium" if place.compile else "highest")
    replica = Replica(model, documents, recipe, place)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while (stage := pipe.recv()) is not None:
            report = replica.gradients(stage)
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    sums[name].copy_(parameter.grad)
                    parameter.grad = None
            pipe.send(report)


class Helpers:
    """The other processes of a run (none for `count` 1). The model's parameters move to shared memory."""

    def __init__(
        self,
        model: DeepseekV4,
        documents: Sequence[Encoded],
        recipe: Recipe,
        *,
        count: int,
        consumed: int,
        compile: bool,
    ) -> None:
        self._parameters = dict(model.named_parameters())
        self._members: list[tuple[Connection, dict[str, torch.Tensor]]] = []
        if count > 1:
            model.share_memory()
        context = mp.get_context("spawn")
        for index in range(1, count):
            here, there = context.Pipe()
            sums = {name: torch.zeros_like(p).share_memory_() for name, p in self._parameters.items()}
            place = Place(index=index, count=count, consumed=consumed, compile=compile)
            args = (model, documents, recipe, place, {n: t.detach() for n, t in sums.items()}, there)
            context.Process(target=_serve, args=args, daemon=True).start()
            there.close()  # so that the end of this process is seen at the other end
            self._members.append((here, sums))

    def start(self, stage: Stage) -> None:
        """Set all to work."""
        for pipe, _ in self._members:
            pipe.send(stage)

    def collect(self) -> list[Report]:
        """Wait for all and add their gradients to the parameters'."""
        reports = []
        for pipe, sums in self._members:
            report: Report = pipe.recv()
            for name in report.trained:
                parameter = self._parameters[name]
                if parameter.grad is None:
                    parameter.grad = sums[name].clone()
                else:
                    parameter.grad += sums[name]
            reports.append(report)
        return reports

    def close(self) -> None:
        for pipe, _ in self._members:
            pipe.send(None)
