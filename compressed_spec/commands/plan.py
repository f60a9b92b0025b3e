"""`compressed-spec plan`: what speculation would bring on a machine that need not be here."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from compressed_spec.measure.planning.check import CheckedStep, check_steps, median_error
from compressed_spec.measure.planning.cpu import measure_cpu
from compressed_spec.measure.planning.devices import read_device, write_device
from compressed_spec.measure.planning.plan import Plan, PointPlan, make_plan
from compressed_spec.measure.planning.roofline import PlannedModel, Roofline
from compressed_spec.measure.planning.storage import FLOAT32_STORAGE, Part, checkpoint_storage
from compressed_spec.models.deepseek_v4.config import DeepseekV4Config, parse_config
from compressed_spec.models.deepseek_v4.load import DEMO, load_model
from compressed_spec.models.deepseek_v4.names import DraftHeadKind
from compressed_spec.models.deepseek_v4.safetensors_folder import read_json_object
from compressed_spec.shaping.calibration import read_calibration

CONFIGS = DEMO.parent / "configs"
_SIZE = re.compile(r"(\d+)([km]?)")
_UNITS = {"": 1, "k": 1024, "m": 1024**2}
_RATE_DEPTH = 15  # of a table made of one rate
_SHOWN_PARTS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCommand:
    """Predict a round's time by nodes, its tokens, and the tree that pays, from dimensions and measured acceptance."""

    config: str = "v4-flash"
    """"v4-flash", "v4-pro", "demo", or a config.json (or its folder)."""
    device: str = "h200"
    """"h100", "h200", "b200", "cpu" (measured here, now), or a JSON file of measured rates."""
    tp: int = 1
    """Devices that share the model."""
    batch: str = "1..64"
    """Batch sizes: "1,4,8", or "1..64" for the powers of two between."""
    context: str = "4k"
    """Tokens before the round, such as "4k,128k,1m"."""
    nodes: str = "2,4,5,6,8,12,16"
    """Nodes of a tree to weigh, root counted."""
    acceptance: str | None = None
    """A file of scripts/calibrate.py, or one rate for every draft of a chain, such as 0.8."""
    drafter: Literal["auto", "ngram"] = "auto"
    """What drafts: the model's own head, or something whose time does not count."""
    save_device: str | None = None
    """A file to keep the rates in, for --device FILE.json later; those of a CPU hold for this config alone."""
    check: bool = False
    """With --device cpu and the demo: time real rounds as well, and fail if the median error reaches 25 %."""
    json: bool = False
    """Print one JSON object only."""

    def run(self) -> None:
        """Plan and print. Raises ValueError for a fault of the user's."""
        if self.check and (self.device != "cpu" or self.config != "demo"):
            raise ValueError("--check times the bundled model on this machine: use --config demo --device cpu.")
        if not self.check and self.acceptance is None:
            raise ValueError(
                "A plan needs --acceptance: a file that scripts/calibrate.py has measured, or one rate such as 0.8."
            )
        batch_sizes, contexts, budgets = _sizes(self.batch), _sizes(self.context), _sizes(self.nodes)
        if self.check:
            self._check()
            return
        assert self.acceptance is not None
        acceptance = _acceptance(self.acceptance)
        plan = make_plan(
            self._roofline(max(batch_sizes)),
            acceptance,
            batch_sizes=batch_sizes,
            contexts=contexts,
            budgets=budgets,
            free_drafts=self.drafter == "ngram",
        )
        if self.json:
            print(json.dumps({"config": self.config, "acceptance": acceptance, **asdict(plan)}))
        else:
            _print_plan(self.config, plan, Console(highlight=False))

    def _roofline(self, batch_size: int) -> Roofline:
        raw = _read_config(self.config)
        config = parse_config(raw)
        head, num_draft_layers = _draft_head(config)
        on_cpu = self.device == "cpu"
        device = None if on_cpu else read_device(self.device)
        wide = on_cpu or (device is not None and device.float32)
        model = PlannedModel(
            config=config,
            # This package dequantises what it loads on a CPU; serving engines multiply what is stored.
            storage=FLOAT32_STORAGE if wide else checkpoint_storage(raw),
            draft_head=head,
            num_draft_layers=num_draft_layers,
            num_ranks=self.tp,
            kv_bytes=4 if wide else 2,
        )
        if on_cpu and self.tp > 1:
            raise ValueError("--device cpu plans one process: leave out --tp.")
        device = device or measure_cpu(model, batch_size)
        if self.save_device is not None:
            write_device(device, Path(self.save_device))
        return Roofline(model, device)

    def _check(self) -> None:
        steps = check_steps(load_model(self.config, progress=False), self._roofline)
        error = median_error(steps)
        if self.json:
            print(json.dumps({"median_error": error, "steps": [asdict(step) for step in steps]}))
        else:
            _print_check(steps, error, Console(highlight=False))
        if error >= 0.25:
            raise ValueError(f"The median error is {error:.0%}, not under 25 %: plan with measured rates instead.")


def _read_config(name: str) -> dict[str, object]:
    built_in = sorted(path.stem for path in CONFIGS.glob("*.json"))
    if name in built_in:
        return read_json_object(CONFIGS / f"{name}.json")
    path = DEMO if name == "demo" else Path(name)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"Unknown config {name!r}: use {', '.join(built_in)}, demo, or the path of a config.json.")
    return read_json_object(path)


def _draft_head(config: DeepseekV4Config) -> tuple[DraftHeadKind, int]:
    """What the released checkpoints of such a config carry: a DSpark head has a stage for each layer it reads."""
    if config.dspark is not None:
        return DraftHeadKind.DSPARK, len(config.dspark.target_layer_ids)
    return (DraftHeadKind.MTP, 1) if config.num_nextn_predict_layers else (DraftHeadKind.NONE, 0)


def _sizes(text: str) -> list[int]:
    """Sizes from "4k,128k,1m" and "1..64", in order, each once."""
    sizes: list[int] = []
    for item in text.lower().split(","):
        ends = [_SIZE.fullmatch(end.strip()) for end in item.split("..")]
        values = [int(end[1]) * _UNITS[end[2]] for end in ends if end is not None]
        if len(values) != len(ends) or len(ends) > 2 or min(values) < 1 or values[0] > values[-1]:
            raise ValueError(f"{text!r} is no list of sizes: write them as 1,4,8, as 4k or 1m, or as 1..64.")
        sizes.append(values[0])
        while len(ends) == 2 and 2 * sizes[-1] <= values[-1]:
            sizes.append(2 * sizes[-1])
    return list(dict.fromkeys(sizes))


def _acceptance(text: str) -> Sequence[Sequence[float]]:
    try:
        rate = float(text)
    except ValueError:
        return read_calibration(text).acceptance
    if not 0 < rate <= 1:
        raise ValueError(f"An acceptance rate lies above 0 and up to 1, not {text}.")
    return [[rate]] * _RATE_DEPTH


def _print_plan(config: str, plan: Plan, console: Console) -> None:
    console.print(
        f"{config} on {plan.num_ranks} x {plan.device}: {_size(plan.weight_bytes)} of weights on each, "
        f"{plan.kv_bytes_per_token:,.0f} bytes of history a token"
    )
    for context in dict.fromkeys(point.context for point in plan.points):
        points = [point for point in plan.points if point.context == context]
        console.print(f"\ncontext {context}: milliseconds a round by nodes; best tree, tokens a round, gain")
        table = Table(box=None, pad_edge=False, collapse_padding=True)
        nodes = (str(one.num_nodes) for one in points[0].budgets)
        for column in ("batch", "off", *nodes, "best tree", "tokens", "gain", "chain's"):
            table.add_column(column, justify="right", no_wrap=True)
        for point in points:
            table.add_row(*_row(point))
        console.print(table)
    _print_parts(plan.points[0], console)


def _row(point: PointPlan) -> list[str]:
    row = [
        str(point.batch_size),
        *(_ms(s) for s in (point.plain_seconds, *(one.tree.seconds for one in point.budgets))),
    ]
    chains = [one.chain.speedup for one in point.budgets if one.chain is not None]
    chain = f"{max(chains):.2f}" if chains else "-"
    if not point.fits:
        return [*row, "no room", "-", "-", "-"]
    if point.best is None:
        return [*row, "off", "1.00", "1.00", chain]
    return [*row, point.best.name, f"{point.best.tokens:.2f}", f"{point.best.speedup:.2f}", chain]


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _ms(seconds: float) -> str:
    """Three digits of milliseconds."""
    value = 1e3 * seconds
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _print_parts(point: PointPlan, console: Console) -> None:
    console.print(f"\nmilliseconds by part, batch {point.batch_size}, context {point.context}")
    table = Table(box=None, pad_edge=False)
    table.add_column("part", no_wrap=True)
    table.add_column("off", justify="right")
    if point.best is not None:
        table.add_column(point.best.name, justify="right")
    largest = sorted({**point.plain_parts, **point.best_parts}, key=lambda part: -point.plain_parts.get(part, 0.0))
    for part in largest[:_SHOWN_PARTS]:
        table.add_row(*_part_row(point, part.value, [part]))
    table.add_row(*_part_row(point, "other parts", largest[_SHOWN_PARTS:]))
    console.print(table)


def _part_row(point: PointPlan, name: str, parts: Sequence[Part]) -> list[str]:
    columns = [point.plain_parts] + ([point.best_parts] if point.best is not None else [])
    return [name, *(f"{1e3 * sum(column.get(part, 0.0) for part in parts):.3f}" for column in columns)]


def _print_check(steps: Sequence[CheckedStep], error: float, console: Console) -> None:
    table = Table(box=None)
    for column in ("stage", "batch", "nodes", "context", "predicted ms", "measured ms", "error"):
        table.add_column(column, justify="right")
    for step in steps:
        table.add_row(
            step.stage,
            str(step.num_rows),
            str(step.num_nodes),
            str(step.context),
            f"{1e3 * step.predicted:.2f}",
            f"{1e3 * step.measured:.2f}",
            f"{step.predicted / step.measured - 1:+.0%}",
        )
    console.print(table)
    console.print(f"median error {error:.1%} over {len(steps)} steps")
