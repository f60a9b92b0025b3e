"""The operations of a layer on the device: plain torch, or Triton's. None of them reads anything back.

T = nodes, D = model width, H = heads, I = index head width, R = pool rows, C = closing windows, S = tokens pooled,
E = entry width, N = entries, X = entries closed in this round, M = residual streams
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from compressed_spec.kernels.attention import sparse_attention
from compressed_spec.kernels.compress import pool_windows
from compressed_spec.kernels.fp8_rows import encode_rows
from compressed_spec.kernels.hyper_connection import MixWeights, collapse, expand, mix_weights
from compressed_spec.kernels.indexer import gathered_index_scores, select_entries
from compressed_spec.kernels.moe import Routing
from compressed_spec.kernels.norm import rms_norm
from compressed_spec.kernels.numerics import numerics_named
from compressed_spec.kernels.rope import apply_rope
from compressed_spec.kernels.stored_experts import StoredExperts, stored_experts
from compressed_spec.rows import CompressionPlan, selected_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInput:
    """The streams collapsed, `[T, D]`, and what the block's output will be mixed with."""

    x_TD: torch.Tensor
    weights: MixWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerOps:
    """norm_rope: norm (weight or None), then rotation, of `[T, H, D]`, or written to rows `out_NX`. mix_and_collapse:
    `mix_weights` and `collapse`. experts: `stored_experts`. pool_entries, index_scores, choose_rows: as below.

    The others are as in the kernels' files of their names, without `numerics`. spare_slots: slots that no node may have
    in a round whose entries only the device knows.
    """

    rms_norm: Callable[[torch.Tensor, torch.Tensor | None, float], torch.Tensor]
    norm_rope: Callable[..., torch.Tensor]
    apply_rope: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    attention: Callable[..., torch.Tensor]
    pool_entries: Callable[..., None]
    index_scores: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, CompressionPlan], torch.Tensor]
    choose_rows: Callable[[torch.Tensor, CompressionPlan, int], torch.Tensor]
    mix_and_collapse: Callable[..., BlockInput]
    expand: Callable[[torch.Tensor, torch.Tensor, MixWeights], torch.Tensor]
    experts: Callable[[torch.Tensor, Routing, StoredExperts, float, torch.Tensor], torch.Tensor]
    spare_slots: int


def torch_ops() -> LayerOps:
    """Plain torch."""
    fast = numerics_named("fast")
    return LayerOps(
        rms_norm=rms_norm,
        norm_rope=_norm_rope,
        apply_rope=apply_rope,
        attention=sparse_attention,
        pool_entries=pool_entries,
        index_scores=index_scores,
        choose_rows=choose_rows,
        mix_and_collapse=_mix_and_collapse,
        expand=lambda output_TD, streams_TMD, weights: expand(output_TD, streams_TMD, weights, fast),
        experts=stored_experts,
        spare_slots=1,
    )


def triton_ops() -> LayerOps:
    """Triton's kernels, and plain torch for the rest."""
    from compressed_spec.kernels import (
        attention_triton,
        compress_triton,
        hyper_connection_triton,
        indexer_triton,
        norm_rope_triton,
        stored_experts_triton,
    )

    def mix_and_collapse(*args: Any, **kwargs: Any) -> BlockInput:
        collapsed = hyper_connection_triton.mix_and_collapse(*args, **kwargs)
        return BlockInput(x_TD=collapsed.input_TD, weights=collapsed.weights)

    def triton_index_scores(
        q_THI: torch.Tensor,
        weights_TH: torch.Tensor,
        keys_RI: torch.Tensor,
        spans_B4: torch.Tensor,
        comp: CompressionPlan,
    ) -> torch.Tensor:
        extra_rows_TX = comp.reach.extra_rows_TX
        return indexer_triton.index_scores(q_THI, weights_TH, keys_RI, spans_B4, extra_rows_TX, comp.num_visible)

    def triton_choose_rows(scores_TN: torch.Tensor, comp: CompressionPlan, k: int) -> torch.Tensor:
        reach = comp.reach
        return indexer_triton.select_rows(scores_TN, k, reach.base_T, reach.count_T, reach.extra_rows_TX)

    return LayerOps(
        rms_norm=norm_rope_triton.rms_norm,
        norm_rope=norm_rope_triton.norm_rope,
        apply_rope=norm_rope_triton.apply_rope,
        attention=attention_triton.sparse_attention,
        pool_entries=compress_triton.pool_entries,
        index_scores=triton_index_scores,
        choose_rows=triton_choose_rows,
        mix_and_collapse=mix_and_collapse,
        expand=hyper_connection_triton.expand,
        experts=stored_experts_triton.stored_experts,
        spare_slots=0,
    )


def _norm_rope(
    x_THD: torch.Tensor,
    weight_D: torch.Tensor | None,
    eps: float,
    cos_TP: torch.Tensor,
    sin_TP: torch.Tensor,
    *,
    out_NX: torch.Tensor | None = None,
) -> torch.Tensor:
    turned_THD = apply_rope(rms_norm(x_THD, weight_D, eps), cos_TP, sin_TP)
    if out_NX is None:
        return turned_THD
    return out_NX.copy_(_rows(turned_THD.flatten(0, 1), out_NX, cos_TP))


def _rows(x_ND: torch.Tensor, like_NX: torch.Tensor, cos_TP: torch.Tensor) -> torch.Tensor:
    """Rows as a pool of these keeps them."""
    return encode_rows(x_ND, 2 * cos_TP.shape[-1]) if like_NX.dtype == torch.uint8 else x_ND


def _mix_and_collapse(streams_TMD: torch.Tensor, *args: Any, **kwargs: Any) -> BlockInput:
    weights = mix_weights(streams_TMD, *args, **kwargs, numerics=numerics_named("fast"))
    return BlockInput(x_TD=collapse(streams_TMD, weights.pre_TM), weights=weights)


def pool_entries(
    buffer_RD: torch.Tensor,
    rows_CS: torch.Tensor,
    weight_E: torch.Tensor,
    eps: float,
    cos_CP: torch.Tensor,
    sin_CP: torch.Tensor,
    out_RE: torch.Tensor,
    out_rows_C: torch.Tensor,
    *,
    overlap: bool,
    dtype: torch.dtype,
) -> None:
    """Pool windows, norm and rotate the entries, and write them, of `dtype` or packed, to rows `out_rows_C`.

    -1 writes nothing. The pool's last row is written to in place of nothing: it must be nobody's.
    """
    pooled_CE = pool_windows(buffer_RD, rows_CS, overlap=overlap).to(dtype)
    entries = apply_rope(rms_norm(pooled_CE, weight_E, eps).unsqueeze(1), cos_CP, sin_CP).squeeze(1)
    target_C = torch.where(out_rows_C < 0, len(out_RE) - 1, out_rows_C)
    out_RE.index_copy_(0, target_C, _rows(entries, out_RE, cos_CP))


def index_scores(
    q_THI: torch.Tensor,
    weights_TH: torch.Tensor,
    keys_RI: torch.Tensor,
    spans_B4: torch.Tensor,
    comp: CompressionPlan,
) -> torch.Tensor:
    """Scores `[T, N]` of the entries in each node's sight, -inf of others.

    spans_B4: (first node, end node, base row, count) of each sequence, which the nodes' own base and count repeat.
    """
    entry_N = torch.arange(comp.num_visible, device=q_THI.device)
    rows_TN = selected_rows(comp.reach, entry_N.expand(len(q_THI), -1))
    return gathered_index_scores(q_THI, weights_TH, keys_RI, rows_TN)


def choose_rows(scores_TN: torch.Tensor, comp: CompressionPlan, k: int) -> torch.Tensor:
    """Rows of the k best entries of each node, by their order, -1 after the last; int64 `[T, K]`."""
    return selected_rows(comp.reach, select_entries(scores_TN, k))
