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
    if isinstance(parsed, dict):
        parsed = parsed.get("parents")
        if not isinstance(parsed, list) or not all(type(parent) is int for parent in parsed):
            raise ValueError(f'The topology file {path} needs "parents", a list of integers: -1 for the root, first.')
        make = lambda: Topology.ordered(parsed)  # noqa: E731
    else:
        if not isinstance(parsed, list) or not all(
            isinstance(ranks, list) and all(type(rank) is int for rank in ranks) for ranks in parsed
        ):
            raise ValueError(
                f'The topology file {path} needs {{"parents": [...]}} or a list of paths of child ranks, such as '
                "[[0], [1], [0, 0]]."
            )
        make = lambda: Topology.from_paths(parsed)  # noqa: E731
    try:
        topology = make()
    except ValueError as error:
        raise ValueError(f"The topology file {path} holds no tree: {error}") from error
    if len(topology) < 2:
        raise ValueError(f"The topology file {path} has a root and nothing to draft: add a node.")
    return topology
