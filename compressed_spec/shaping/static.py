"""Topologies from a file: `static:FILE`."""

import json
from pathlib import Path

from compressed_spec.topology import Topology


def read_json(path: str, what: str) -> object:
    """A parsed JSON file. Raises ValueError, naming it, if it cannot be read."""
    try:
        parsed: object = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"The {what} file {path} cannot be read as JSON: {error}.") from error
    return parsed


def read_topology(path: str) -> Topology:
    """`{"parents": [-1, 0, 0, 1]}`, or a list of paths of child ranks such as `[[0], [1], [0, 0]]` (Medusa's choices).

    Raises ValueError for anything else, or for a tree without a node beside the root.
    """
    parsed = read_json(path, "topology")
    paths = parsed if isinstance(parsed, list) else []
    parents = parsed.get("parents", []) if isinstance(parsed, dict) else []
    if not all(_is_ints(ranks) for ranks in paths) or not _is_ints(parents) or not (paths or parents):
        raise ValueError(
            f'The topology file {path} needs {{"parents": [-1, 0, ...]}} or a list of paths of child ranks, such as '
            "[[0], [1], [0, 0]]."
        )
    try:
        topology = Topology.from_paths(paths) if paths else Topology.ordered(parents)
    except ValueError as error:
        raise ValueError(f"The topology file {path} holds no tree: {error}") from error
    if len(topology) < 2:
        raise ValueError(f"The topology file {path} has a root and nothing to draft: add a node.")
    return topology


def _is_ints(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int for value in values)
