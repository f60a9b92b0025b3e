"""RoPE settings of both kinds of layer: upstream's flat `rope_scaling` or transformers' nested `rope_parameters`."""

from collections.abc import Mapping
from dataclasses import dataclass

from compressed_spec.models.deepseek_v4.json_fields import read_float, read_int, read_optional_int, read_section


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """YaRN of the compressing layers' RoPE; cos and sin are never rescaled (attention factor 1)."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float
    beta_slow: float


def _rope_sections(raw: Mapping[str, object]) -> dict[str, Mapping[str, object]]:
    """`rope_parameters` by label, {"main", "compress"}, or upstream's flat `rope_scaling`, which is all compress."""
    nested = read_section(raw, "rope_parameters")
    flat = read_section(raw, "rope_scaling")
    if nested is None or not {"main", "compress"} & nested.keys():
        scaling = dict(flat or nested or {})
        base = scaling.pop("rope_theta", None)  # transformers adds the uncompressed layers' base to a flat section
        return {"main": {} if base is None else {"rope_theta": base}, "compress": scaling}
    if flat is not None:
        raise ValueError("rope_scaling and rope_parameters are both in config.json: drop rope_scaling")
    return {label: read_section(nested, label) or {} for label in ("main", "compress")}


def parse_theta(raw: Mapping[str, object], key: str, label: str) -> float:
    """RoPE base of one kind of layer, from the top level, `rope_parameters`, or both if they agree."""
    section = _rope_sections(raw)[label]
    inner = read_float(section, "rope_theta") if section.get("rope_theta") is not None else None
    if inner is None:
        return read_float(raw, key)
    if raw.get(key) is not None and read_float(raw, key) != inner:
        raise ValueError(
            f"{key} is {raw[key]} but rope_parameters[{label!r}] says {inner}: make them agree or drop one"
        )
    return inner


def parse_rope_dim(raw: Mapping[str, object]) -> int:
    """Rotated channels a head: `qk_rope_head_dim`, or `partial_rotary_factor` times `head_dim`."""
    head_dim = read_int(raw, "head_dim")
    dim = read_optional_int(raw, "qk_rope_head_dim")
    sections = {"config.json": raw, **_rope_sections(raw)}
    for where, section in sections.items():
        if section.get("partial_rotary_factor") is None:
            continue
        factor = read_float(section, "partial_rotary_factor")
        implied = round(head_dim * factor)
        if abs(implied - head_dim * factor) > 1e-6 * head_dim:
            raise ValueError(
                f"partial_rotary_factor is {factor}, which must give whole channels of head_dim = {head_dim}"
            )
        if dim is not None and dim != implied:
            raise ValueError(
                f"partial_rotary_factor is {factor} in {where}, that is {implied} channels, but qk_rope_head_dim or "
                f"another factor says {dim}: make them agree or drop one"
            )
        dim = implied
    if dim is None:
        raise ValueError("qk_rope_head_dim (or partial_rotary_factor) is missing from config.json: add it")
    return dim


def parse_yarn(raw: Mapping[str, object]) -> YarnScaling | None:
    """YaRN of the compressing layers, or None for plain RoPE; sliding-window layers are never scaled."""
    sections = _rope_sections(raw)
    if _rope_type(sections["main"]) != "default":
        raise ValueError("rope_parameters['main'] asks for scaled RoPE: sliding-window layers support 'default' only")
    section = sections["compress"]
    rope_type = _rope_type(section)
    if rope_type == "default":
        return None
    if rope_type != "yarn":
        raise ValueError(f"rope_scaling has type {rope_type!r}: only 'yarn' and 'default' are supported")
    for key, only in (("attention_factor", 1.0), ("truncate", True)):
        if section.get(key) not in (None, only):
            raise ValueError(f"rope_scaling has {key} {section[key]!r}: DeepSeek-V4 uses {only!r} only, correct it")
    return YarnScaling(
        factor=read_float(section, "factor"),
        original_max_position_embeddings=read_int(section, "original_max_position_embeddings"),
        beta_fast=read_float(section, "beta_fast", default=32.0),
        beta_slow=read_float(section, "beta_slow", default=1.0),
    )


def _rope_type(section: Mapping[str, object]) -> object:
    old, new = section.get("type"), section.get("rope_type")
    if old is not None and new is not None and old != new:
        raise ValueError(f"rope_scaling has type {old!r} and rope_type {new!r}: drop one")
    return new or old or "default"
