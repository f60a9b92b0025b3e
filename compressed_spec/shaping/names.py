"""How users name trees: `off`, `sN_kK_dD`, `static:FILE`, `optimal_dD:FILE`, `dynamic`, `auto`."""

import re
from dataclasses import dataclass

from compressed_spec.drafting.base import DraftPlan
from compressed_spec.shaping.auto import DEFAULT_CAPS
from compressed_spec.shaping.base import FixedShaper, Shaper
from compressed_spec.shaping.calibration import DEFAULT_SCORING, read_calibration
from compressed_spec.shaping.dynamic import DynamicShaper
from compressed_spec.shaping.optimal import optimal_topology
from compressed_spec.shaping.static import read_topology
from compressed_spec.tree import TreeShape, parse_tree

DYNAMIC_SHAPE = TreeShape(num_steps=4, top_k=3, num_nodes=8)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoTree:
    """`auto`, whose shaper needs measurements first. caps: the largest steps, children and nodes."""

    caps: TreeShape


def parse_shape(text: str) -> Shaper | AutoTree | None:
    """What a tree's name stands for; None for "off". Reads the file that it names.

    * `sN_kK_dD`: see `parse_tree`.
    * `static:FILE`: the topology in a JSON file (`read_topology`).
    * `optimal_dD:FILE`: the best topology of D nodes for the acceptance in a JSON file (`read_calibration`).
    * `dynamic`, `dynamic_sN_kK_dD`: best-first within these caps (s4_k3_d8), scores calibrated on the way;
      `dynamic:FILE` or `dynamic_sN_kK_dD:FILE` starts from a calibration file.
    * `auto`, `auto_sN_kK_dD`: the tree that pays, within these caps (s6_k4_d16).

    Raises ValueError for an unknown name, or a file that does not hold what it should.
    """
    name, _, path = text.partition(":")
    kind, _, caps = name.partition("_")
    if kind == "static" and path and not caps:
        topology = read_topology(path)
        return FixedShaper(DraftPlan(shape=topology.shape, topology=topology))
    if kind == "optimal" and path and (match := re.fullmatch(r"d(\d+)", caps)):
        try:
            topology = optimal_topology(read_calibration(path).acceptance, int(match.group(1)))
        except ValueError as error:
            raise ValueError(f"Tree {text!r}: {error}") from error
        return FixedShaper(DraftPlan(shape=topology.shape, topology=topology))
    if kind == "dynamic":
        scoring = read_calibration(path).scoring if path else DEFAULT_SCORING
        return DynamicShaper(_caps(text, caps) or DYNAMIC_SHAPE, scoring)
    if kind == "auto" and not path:
        return AutoTree(caps=_caps(text, caps) or DEFAULT_CAPS)
    if kind in ("static", "optimal", "auto"):
        raise ValueError(
            f"Tree {text!r} is not complete: write static:FILE, optimal_dD:FILE (D nodes, root counted), auto or "
            "auto_sN_kK_dD."
        )
    shape = parse_tree(text)
    return None if shape is None else FixedShaper(DraftPlan(shape=shape))


def _caps(text: str, caps: str) -> TreeShape | None:
    try:
        return parse_tree(caps) if caps else None
    except ValueError as error:
        raise ValueError(f"Tree {text!r}: {error}") from error
