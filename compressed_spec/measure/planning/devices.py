"""What a machine can do: rates from data sheets with an assumed attainable part, or measured ones from a file."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from compressed_spec.measure.planning.storage import Rate
from compressed_spec.models.deepseek_v4.load import DEMO
from compressed_spec.shaping.static import read_json

DEVICES = DEMO.parent / "devices"
_NUMBERS = ("memory_bytes", "bandwidth", "link_bandwidth", "link_seconds", "launch_seconds")
_WIDER = {Rate.FP4: Rate.FP8, Rate.FP8: Rate.BF16, Rate.BF16: Rate.FP32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Seconds of rounds whose matrices are tiny, by the terms of a `CostModel`; of a model of so many layers."""

    num_layers: int
    verify: tuple[float, ...]
    draft: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Attainable rates of one device, in bytes, operations and seconds.

    flops: by precision; one that is missing runs as the next wider. link_bandwidth: to the other devices, one way;
    link_seconds: of the smallest all-reduce. launch_seconds: of one kernel. overhead: measured, in place of counted
    launches. gather_bandwidth: bytes a second of history rows that each node reads for itself, copied before use; 0
    where kernels read them in place and once a sequence. pass_bandwidth: bytes a second of passes over activations, one
    for each operation; 0 where kernels are fused. overlaps: whether bytes move while products are computed, so that the
    slower counts instead of both. float32: runs in float32, whatever is stored.
    """

    name: str
    memory_bytes: float
    bandwidth: float
    flops: Mapping[Rate, float]
    link_bandwidth: float = math.inf
    link_seconds: float = 0.0
    launch_seconds: float = 0.0
    overhead: Overhead | None = None
    gather_bandwidth: float = 0.0
    pass_bandwidth: float = 0.0
    overlaps: bool = True
    float32: bool = False

    def seconds(self, num_bytes: float, flops: float, precision: Rate) -> float:
        """To move so many bytes and carry out so many operations in this precision."""
        moving, computing = num_bytes / self.bandwidth, flops / self._rate(precision)
        return max(moving, computing) if self.overlaps else moving + computing

    def _rate(self, precision: Rate) -> float:
        while precision not in self.flops:
            precision = _WIDER[precision]
        return self.flops[precision]


def read_device(name_or_file: str) -> Device:
    """A built-in device by name, or the rates in a JSON file.

    Raises ValueError for an unknown name, and for a file that lacks a rate or has one that is not above 0.
    """
    names = sorted(path.stem for path in DEVICES.glob("*.json"))
    if name_or_file not in names and not name_or_file.endswith(".json"):
        raise ValueError(
            f"Unknown device {name_or_file!r}: use cpu, {', '.join(names)}, or a JSON file of measured rates."
        )
    path = DEVICES / f"{name_or_file}.json" if name_or_file in names else Path(name_or_file)
    parsed = read_json(str(path), "device")
    raw = parsed if isinstance(parsed, dict) else {}
    flops, attainable = raw.get("flops", {}), raw.get("attainable", {})
    try:
        numbers = {key: float(raw[key]) for key in _NUMBERS}
        overhead = _overhead(raw.get("overhead"))
        passes = {key: float(raw.get(key, 0.0)) for key in ("gather_bandwidth", "pass_bandwidth")}
        part = {key: float(attainable.get(key, 1.0)) for key in ("bandwidth", "flops", "link")}
        rates = {Rate(key): float(value) * part["flops"] for key, value in flops.items()}
        valid = (
            min(passes.values()) >= 0
            and min(*numbers.values(), *rates.values(), *part.values()) > 0
            and Rate.FP32 in rates
        )
    except (KeyError, TypeError, ValueError, AttributeError):
        valid = False
    if not valid:
        raise ValueError(
            f"The device file {path} needs {', '.join(_NUMBERS)} and flops with at least fp32, each above 0: see the "
            f"files in {DEVICES}."
        )
    return Device(
        name=path.stem,
        memory_bytes=numbers["memory_bytes"],
        bandwidth=numbers["bandwidth"] * part["bandwidth"],
        flops=rates,
        link_bandwidth=numbers["link_bandwidth"] * part["link"],
        link_seconds=numbers["link_seconds"],
        launch_seconds=numbers["launch_seconds"],
        overhead=overhead,
        gather_bandwidth=passes["gather_bandwidth"],
        pass_bandwidth=passes["pass_bandwidth"],
        overlaps=raw.get("overlaps", True) is True,
        float32=raw.get("float32", False) is True,
    )


def write_device(device: Device, path: Path) -> None:
    """Write a file that `read_device` reads."""
    known = {key: value for key, value in asdict(device).items() if key != "name"}
    # JSON has no infinity: what no device is linked to may have any link.
    known |= {key: 1.0 for key in ("link_bandwidth", "link_seconds", "launch_seconds") if known[key] in (0.0, math.inf)}
    path.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def _overhead(raw: object) -> Overhead | None:
    if raw is None:
        return None
    if not isinstance(raw, dict):
        raise TypeError("an overhead is an object")
    verify, draft = (tuple(float(number) for number in raw[key]) for key in ("verify", "draft"))
    if (len(verify), len(draft)) != (5, 3) or min(*verify, *draft) < 0:
        raise ValueError("an overhead has five terms and three")
    return Overhead(num_layers=int(raw["num_layers"]), verify=verify, draft=draft)
