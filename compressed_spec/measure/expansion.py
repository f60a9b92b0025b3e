"""Lists on the command line: `off,s3_k2_d6,s{2..7}_k{1,2,3}_d{2..16},auto`."""

import re
from dataclasses import dataclass
from itertools import product

from compressed_spec.shaping import parse_shape
from compressed_spec.tree import parse_tree

_RANGE = re.compile(r"(\d+)\.\.(\d+)(?:\.\.(\d+))?")
_NUMBERED = re.compile(r"s\d+_k\d+_d\d+")


def expand(text: str) -> list[str]:
    """The items of a comma-separated list, braces multiplied out, the last brace fastest; repetitions stay.

    A brace holds alternatives, each a text or a range of whole numbers `2..7` or `2..16..2` (with a step), both ends
    included, upwards or downwards.
    Raises ValueError for an empty item, braces in braces or without a partner, or a step of 0.
    """
    return [item for part in _split(text) for item in _expand_item(part)]


def _split(text: str) -> list[str]:
    """At commas outside braces."""
    parts, depth = [""], 0
    for letter in text:
        if letter == "{":
            depth += 1
        elif letter == "}":
            depth -= 1
        if depth not in (0, 1):
            raise ValueError(
                f"The braces of {text!r} do not match, or lie in one another: write them as in s{{2..7}}_k1."
            )
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise ValueError(f"A brace of {text!r} is not closed: write it as in s{{2..7}}_k1.")
    parts = [part.strip() for part in parts]
    if not all(parts):
        raise ValueError(f"The list {text!r} has an empty item: leave out the comma.")
    return parts


def _expand_item(item: str) -> list[str]:
    pieces = re.split(r"\{([^{}]*)\}", item)
    choices = [_alternatives(item, piece) if i % 2 else [piece] for i, piece in enumerate(pieces)]
    return ["".join(combination) for combination in product(*choices)]


def _alternatives(item: str, inside: str) -> list[str]:
    found: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            found.append(part.strip())
            continue
        first, last, step = int(match.group(1)), int(match.group(2)), int(match.group(3) or 1)
        if not step:
            raise ValueError(f"A range of {item!r} has a step of 0: use 1 or more.")
        sign = 1 if first <= last else -1
        found += map(str, range(first, last + sign, sign * step))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeList:
    """Names of trees, each once. num_skipped: combinations that make no tree."""

    names: tuple[str, ...]
    num_skipped: int


def expand_trees(text: str) -> TreeList:
    """The trees of a list. Of a term with braces, combinations sN_kK_dD that make no tree are skipped and counted.

    Raises ValueError as `expand` and `parse_shape` do, or for a term none of whose combinations makes a tree.
    """
    names: dict[str, None] = {}
    num_skipped = 0
    for part in _split(text):
        items = _expand_item(part)
        made = 0
        for item in items:
            try:
                name = _canonical(item)
            except ValueError as error:
                if len(items) == 1 or not _NUMBERED.fullmatch(item):
                    raise
                num_skipped += 1
                reason = error
                continue
            made += 1
            names[name] = None
        if not made:
            raise ValueError(f"None of the {len(items)} combinations of {part!r} makes a tree ({reason})")
    return TreeList(names=tuple(names), num_skipped=num_skipped)


def _canonical(name: str) -> str:
    if not _NUMBERED.fullmatch(name):
        parse_shape(name)
        return name
    return str(parse_tree(name))


def expand_numbers(option: str, text: str, *, least: float, whole: bool) -> list[float]:
    """The numbers of a list, each once. Raises ValueError, naming the option, for no number or one below `least`."""
    numbers: dict[float, None] = {}
    for item in expand(text):
        try:
            number = int(item) if whole else float(item)
        except ValueError:
            kind = "whole number" if whole else "number"
            raise ValueError(f"{option} has {item!r}, which is no {kind}: write it as in 1,2,4.") from None
        if not least <= number < float("inf"):
            raise ValueError(f"{option} has {item}: use {least:g} or more.")
        numbers[number] = None
    return list(numbers)


def expand_names(text: str) -> list[str]:
    """The items of a list, each once."""
    return list(dict.fromkeys(expand(text)))
