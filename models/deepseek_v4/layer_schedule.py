"""Attention and routing of each body layer: upstream `compress_ratios` or transformers `layer_types`."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from compressed_spec.models.deepseek_v4.json_fields import read_list, read_optional_int, read_section

CSA_RATIO = 4  # upstream `compress_ratios`: 4 means CSA with overlapping windows, any other positive ratio HCA


class AttentionKind(StrEnum):
    """What a layer attends to besides its sliding window; the values are transformers' `layer_types`."""

    SLIDING = "sliding_attention"
    CSA = "compressed_sparse_attention"
    HCA = "heavily_compressed_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One body layer: its attention, tokens a compressed entry stands for (0 for SLIDING), and its routing."""

    kind: AttentionKind
    ratio: int
    hash_routed: bool


def parse_layers(raw: Mapping[str, object], num_layers: int) -> tuple[LayerSpec, ...]:
    """The body layers of a parsed config.json, in order; raises ValueError where its keys are missing or disagree."""
    ratios = _compress_ratios(raw, num_layers)
    kinds = _layer_types(raw, num_layers)
    rates = _compress_rates(raw)
    hash_routed = _hash_routed(raw, num_layers)
    if ratios is None and kinds is None:
        raise ValueError("compress_ratios (or layer_types) is missing from config.json: add one entry a layer")
    specs: list[LayerSpec] = []
    for i in range(num_layers):
        if ratios is not None:
            ratio = ratios[i]
            kind = _kind_of_ratio(ratio)
            if kinds is not None and kinds[i] is not kind:
                raise ValueError(
                    f"layer_types[{i}] is {kinds[i].value!r} but compress_ratios[{i}] is {ratio}, which means "
                    f"{kind.value!r}: make them agree or drop one"
                )
            if rates.get(kind, ratio) != ratio:
                raise ValueError(
                    f"compress_ratios[{i}] is {ratio} but compress_rates[{kind.value!r}] is {rates[kind]}: "
                    "make them agree or drop one"
                )
        else:
            assert kinds is not None
            kind = kinds[i]
            if kind not in rates:
                raise ValueError(f"compress_rates has no {kind.value!r}: add how many tokens an entry stands for")
            ratio = rates[kind]
        specs.append(LayerSpec(kind=kind, ratio=ratio, hash_routed=hash_routed[i]))
    return tuple(specs)


def _kind_of_ratio(ratio: int) -> AttentionKind:
    if ratio == 0:
        return AttentionKind.SLIDING
    return AttentionKind.CSA if ratio == CSA_RATIO else AttentionKind.HCA


def _compress_ratios(raw: Mapping[str, object], num_layers: int) -> list[int] | None:
    """Upstream's schedule, one ratio a body layer; what follows belongs to draft layers, which never compress."""
    values = read_list(raw, "compress_ratios")
    if values is None:
        return None
    if len(values) < num_layers:
        raise ValueError(
            f"compress_ratios has {len(values)} entries for num_hidden_layers = {num_layers}: add the rest"
        )
    ratios: list[int] = []
    for i, value in enumerate(values):
        if type(value) is not int or value < 0:
            raise ValueError(f"compress_ratios[{i}] is {value!r}: use 0 (sliding), 4 (CSA) or another ratio (HCA)")
        if i >= num_layers and value:
            raise ValueError(f"compress_ratios[{i}] is {value} but belongs to a draft layer: set it to 0 or drop it")
        ratios.append(value)
    return ratios[:num_layers]


def _layer_types(raw: Mapping[str, object], num_layers: int) -> list[AttentionKind] | None:
    """transformers' schedule, one name a layer."""
    names = read_list(raw, "layer_types", length=num_layers)
    if names is None:
        return None
    for i, name in enumerate(names):
        if name not in list(AttentionKind):
            raise ValueError(f"layer_types[{i}] is {name!r}: use one of {', '.join(AttentionKind)}")
    return [AttentionKind(str(name)) for name in names]


def _compress_rates(raw: Mapping[str, object]) -> dict[AttentionKind, int]:
    """transformers' rates by kind: `compress_rates`, or the older `compress_rate_csa` and `compress_rate_hca`."""
    rates = {AttentionKind.SLIDING: 0}
    section = read_section(raw, "compress_rates") or {}
    for kind, older_key in ((AttentionKind.CSA, "compress_rate_csa"), (AttentionKind.HCA, "compress_rate_hca")):
        rate = read_optional_int(section, kind.value)
        older = read_optional_int(raw, older_key)
        if rate is not None and older is not None and rate != older:
            raise ValueError(f"compress_rates[{kind.value!r}] is {rate} but {older_key} is {older}: drop one")
        if rate is not None or older is not None:
            rates[kind] = rate if rate is not None else older or 0
    return rates


def _hash_routed(raw: Mapping[str, object], num_layers: int) -> list[bool]:
    """Which layers take their experts from the token table: the first `num_hash_layers`, or `mlp_layer_types`."""
    names = read_list(raw, "mlp_layer_types", length=num_layers)
    count = read_optional_int(raw, "num_hash_layers", minimum=0)
    if names is None and count is None:
        raise ValueError("num_hash_layers (or mlp_layer_types) is missing from config.json: add it")
    for i, name in enumerate(names or ()):
        if name not in ("hash_moe", "moe"):
            raise ValueError(f"mlp_layer_types[{i}] is {name!r}: use 'hash_moe' or 'moe'")
    by_name = None if names is None else [name == "hash_moe" for name in names]
    by_count = None if count is None else [i < count for i in range(num_layers)]
    if by_name is not None and by_count is not None and by_name != by_count:
        raise ValueError(f"num_hash_layers is {count} but mlp_layer_types says otherwise: make them agree or drop one")
    return by_name or by_count or []
