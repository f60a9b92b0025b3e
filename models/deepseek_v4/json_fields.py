"""Typed reads of a parsed JSON object: every complaint is one ValueError that names the key and the remedy."""

import math
from collections.abc import Mapping, Sequence


def read_int(raw: Mapping[str, object], key: str, *, default: int | None = None, minimum: int = 1) -> int:
    """An integer of at least `minimum`; bool, str and float are refused, null counts as missing."""
    value = _present(raw, key, default)
    if type(value) is not int or value < minimum:
        raise ValueError(f"{key} is {value!r}: config.json needs an integer of at least {minimum} there")
    return value


def read_optional_int(raw: Mapping[str, object], key: str, *, minimum: int = 1) -> int | None:
    """`read_int`, or None where the key is missing or null."""
    return None if raw.get(key) is None else read_int(raw, key, minimum=minimum)


def read_float(raw: Mapping[str, object], key: str, *, default: float | None = None) -> float:
    """A finite number above zero; bool and str are refused, null counts as missing."""
    value = _present(raw, key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{key} is {value!r}: config.json needs a finite number above 0 there")
    return float(value)


def read_list(raw: Mapping[str, object], key: str, *, length: int | None = None) -> Sequence[object] | None:
    """A list of exactly `length` entries (if given), or None where the key is missing or null."""
    value = raw.get(key)
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise ValueError(f"{key} is {value!r}: config.json needs a list there")
    if length is not None and len(value) != length:
        raise ValueError(f"{key} has {len(value)} entries: config.json needs {length}, one a layer")
    return value


def read_section(raw: Mapping[str, object], key: str) -> Mapping[str, object] | None:
    """A nested object, or None where the key is missing or null."""
    value = raw.get(key)
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} is {value!r}: config.json needs an object there")
    return {f"{name}": item for name, item in value.items()}


def _present(raw: Mapping[str, object], key: str, default: float | None) -> object:
    value = raw.get(key)
    if value is not None:
        return value
    if default is None:
        raise ValueError(f"{key} is missing from config.json: add it, it defines the architecture")
    return default
