"""The Triton launchers, for whoever puts a model on a GPU. Importing this imports triton; nothing else here does so."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from compressed_spec.kernels import (
    attention_triton,
    compress_triton,
    hyper_connection_triton,
    indexer_triton,
    norm_rope_triton,
)

Launcher = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonLaunchers:
    """One launcher an op, with the signature of the reference of that name.

    Fused ones have no reference of their own: norm_rope (`apply_rope` of `rms_norm`), pool_entries (`pool_windows`,
    `rms_norm`, `apply_rope`, and the write), select_rows (`select_entries` as rows), mix_and_collapse (`mix_weights`
    and `collapse`).
    """

    attention: Launcher
    index_scores: Launcher
    select_entries: Launcher
    select_rows: Launcher
    pool_windows: Launcher
    pool_entries: Launcher
    rms_norm: Launcher
    apply_rope: Launcher
    norm_rope: Launcher
    mix_weights: Launcher
    mix_and_collapse: Launcher
    head_weights: Launcher
    collapse: Launcher
    expand: Launcher


def triton_launchers() -> TritonLaunchers:
    """All launchers of these ops."""
    return TritonLaunchers(
        attention=attention_triton.sparse_attention,
        index_scores=indexer_triton.index_scores,
        select_entries=indexer_triton.select_entries,
        select_rows=indexer_triton.select_rows,
        pool_windows=compress_triton.pool_windows,
        pool_entries=compress_triton.pool_entries,
        rms_norm=norm_rope_triton.rms_norm,
        apply_rope=norm_rope_triton.apply_rope,
        norm_rope=norm_rope_triton.norm_rope,
        mix_weights=hyper_connection_triton.mix_weights,
        mix_and_collapse=hyper_connection_triton.mix_and_collapse,
        head_weights=hyper_connection_triton.head_weights,
        collapse=hyper_connection_triton.collapse,
        expand=hyper_connection_triton.expand,
    )
