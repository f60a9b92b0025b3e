"""What a checkpoint is, what it needs and what is wrong with it, without loading a weight."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from compressed_spec.memory import human_bytes
from compressed_spec.models.deepseek_v4.checkpoint import Checkpoint, DraftHeadKind, read_checkpoint
from compressed_spec.models.deepseek_v4.config import AttentionKind, LayerSpec
from compressed_spec.models.deepseek_v4.weight_plan import WeightPlan, plan_weights
from compressed_spec.needs import Needs

_LABELS = {AttentionKind.SLIDING: "sliding", AttentionKind.CSA: "CSA", AttentionKind.HCA: "HCA"}
_LONGEST_PERIOD = 4
_PROBLEMS_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeTotal:
    """Stored tensors of one dtype."""

    num_tensors: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """Result of `inspect_checkpoint`; `dataclasses.asdict` makes it JSON. Sizes are in bytes."""

    folder: str
    architecture: str
    layout: str
    draft_head: str
    num_hidden_layers: int
    num_layers_by_kind: dict[str, int]
    layer_kinds: str
    num_hash_layers: int
    num_tensors: int
    tensors_by_dtype: dict[str, DtypeTotal]
    weight_bytes: int
    batch_size: int
    max_length: int
    cache_bytes: int
    needs: Needs | None
    notes: tuple[str, ...]
    problems: tuple[str, ...]


def inspect_checkpoint(
    path: str | Path,
    *,
    batch_size: int,
    max_length: int,
    cache_nbytes: Callable[[Checkpoint, int, int], int],
) -> Inspection:
    """Read config and headers, and hold them against each other.

    All faults of files and tensors are listed in `problems`. Raises ValueError where there is nothing to inspect: no
    such folder, no weights, an unusable config.

    cache_nbytes: bytes of a cache, from (checkpoint, batch_size, max_length).
    """
    checkpoint = read_checkpoint(path)
    return inspect_headers(
        checkpoint, batch_size=batch_size, max_length=max_length, cache_nbytes=cache_nbytes, needs=None
    )


def inspect_headers(
    checkpoint: Checkpoint,
    *,
    batch_size: int,
    max_length: int,
    cache_nbytes: Callable[[Checkpoint, int, int], int],
    needs: Callable[[Checkpoint, WeightPlan], Needs] | None,
) -> Inspection:
    """`inspect_checkpoint` of one that has been read. needs: works out what each process of a run needs."""
    config = checkpoint.config
    plan = plan_weights(checkpoint)
    dtypes = sorted({info.dtype for info in checkpoint.tensors.values()})
    totals = {dtype: [info.nbytes for info in checkpoint.tensors.values() if info.dtype == dtype] for dtype in dtypes}
    kinds = Counter(_LABELS[layer.kind] for layer in config.layers)
    return Inspection(
        folder=str(checkpoint.folder),
        architecture="DeepseekV4ForCausalLM",
        layout=checkpoint.layout.value,
        draft_head=checkpoint.draft_head.value,
        num_hidden_layers=config.num_hidden_layers,
        num_layers_by_kind={label: kinds[label] for label in _LABELS.values()},
        layer_kinds=compact_layers(config.layers),
        num_hash_layers=sum(layer.hash_routed for layer in config.layers),
        num_tensors=len(checkpoint.tensors),
        tensors_by_dtype={
            dtype: DtypeTotal(num_tensors=len(sizes), num_bytes=sum(sizes)) for dtype, sizes in totals.items()
        },
        weight_bytes=sum(info.nbytes for info in checkpoint.tensors.values()),
        batch_size=batch_size,
        max_length=max_length,
        cache_bytes=cache_nbytes(checkpoint, batch_size, max_length),
        needs=None if needs is None or plan.problems or checkpoint.problems else needs(checkpoint, plan),
        notes=_notes(checkpoint),
        problems=(*checkpoint.problems, *plan.problems),
    )


def _notes(checkpoint: Checkpoint) -> tuple[str, ...]:
    promised = checkpoint.config.num_nextn_predict_layers
    if checkpoint.draft_head is DraftHeadKind.NONE and promised:
        return (f"config.json has num_nextn_predict_layers = {promised}, but the weights hold no draft head",)
    return ()


def compact_layers(layers: Sequence[LayerSpec]) -> str:
    """Kinds of layers in order, repetitions folded: "2 x sliding, 20 x (CSA/4, HCA/128), CSA/4"."""
    labels = [_LABELS[layer.kind] + (f"/{layer.ratio}" if layer.ratio else "") for layer in layers]
    parts: list[str] = []
    i = 0
    while i < len(labels):
        period, repeats = 1, 1
        for length in range(1, _LONGEST_PERIOD + 1):
            count = 1
            while labels[i + count * length : i + (count + 1) * length] == labels[i : i + length]:
                count += 1
            if count > 1 and count * length > period * repeats:
                period, repeats = length, count
        unit = ", ".join(labels[i : i + period])
        parts.append(unit if repeats == 1 else f"{repeats} x {unit}" if period == 1 else f"{repeats} x ({unit})")
        i += period * repeats
    return ", ".join(parts)


def print_inspection(inspection: Inspection, console: Console) -> None:
    """Render as a table, then every note, then the problems (the first twenty and how many more)."""
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in _rows(inspection):
        table.add_row(name, escape(value))
    console.print(table)
    for note in inspection.notes:
        console.print(f"note: {note}", markup=False)
    for problem in inspection.problems[:_PROBLEMS_SHOWN]:
        console.print(f"problem: {problem}", markup=False)
    if len(inspection.problems) > _PROBLEMS_SHOWN:
        console.print(f"... and {len(inspection.problems) - _PROBLEMS_SHOWN} more problems", markup=False)


def _rows(inspection: Inspection) -> list[tuple[str, str]]:
    by_kind = ", ".join(f"{count} {kind}" for kind, count in inspection.num_layers_by_kind.items() if count)
    rows = [
        ("checkpoint", inspection.folder),
        ("architecture", f"{inspection.architecture} ({inspection.layout} layout)"),
        ("layers", f"{inspection.num_hidden_layers}: {by_kind}; {inspection.num_hash_layers} hash-routed"),
        ("layer kinds", inspection.layer_kinds),
        ("draft head", inspection.draft_head),
        ("weights", f"{inspection.num_tensors} tensors, {human_bytes(inspection.weight_bytes)}"),
    ]
    rows += [
        (f"  {dtype}", f"{total.num_tensors} tensors, {human_bytes(total.num_bytes)}")
        for dtype, total in inspection.tensors_by_dtype.items()
    ]
    cache = f"{human_bytes(inspection.cache_bytes)} for {inspection.batch_size} x {inspection.max_length} tokens"
    rows.append(("cache", cache))
    if inspection.needs is not None:
        rows += _needs_rows(inspection.needs)
    return [*rows, ("problems", str(len(inspection.problems)) if inspection.problems else "none")]


def _needs_rows(needs: Needs) -> list[tuple[str, str]]:
    return [
        (f"each of {needs.num_processes}", f"{human_bytes(needs.total_bytes)} of device memory"),
        ("  reads", f"{human_bytes(needs.stored_bytes)} of the checkpoint"),
        ("  weights", f"{human_bytes(needs.weight_bytes)} in {needs.dtype}"),
        ("  cache", f"{human_bytes(needs.cache_bytes)}, reserved in full"),
        ("  scratch", human_bytes(needs.scratch_bytes)),
        ("processes", f"{', '.join(map(str, needs.possible))} can share this model"),
    ]
