"""How upstream checkpoints store each parameter."""

import re
from enum import Enum, auto


class StoredKind(Enum):
    """experts, linear: matrices that quantised checkpoints quantise, the routed experts' and the others; table: of
    integers; wide: float32 in every checkpoint; plain: everything else."""

    EXPERTS = auto()
    LINEAR = auto()
    TABLE = auto()
    WIDE = auto()
    PLAIN = auto()


_KINDS = tuple(
    (re.compile(pattern), kind)
    for pattern, kind in (
        (r"\.experts\.w(13|2)$", StoredKind.EXPERTS),
        (r"\.attn\.(wq_a|wq_b|wkv|wo_a|wo_b|indexer\.wq_b)\.weight$", StoredKind.LINEAR),
        (r"\.shared_experts\.w[123]\.weight$", StoredKind.LINEAR),
        (r"^mtp\.0\.(e_proj|h_proj|main_proj)\.weight$", StoredKind.LINEAR),
        (r"\.tid2eid$", StoredKind.TABLE),
        (r"(^|\.)hc_\w+$|\.attn_sink$|\.ape$|\.gate\.bias$", StoredKind.WIDE),
    )
)


def stored_kind(parameter: str) -> StoredKind:
    """Of a parameter of `names.expected_parameters`."""
    return next((kind for pattern, kind in _KINDS if pattern.search(parameter)), StoredKind.PLAIN)
