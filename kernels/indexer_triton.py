"""The lightning indexer on a GPU: scores of keys, and the best of them by (score descending, index ascending).

R = pool rows, T = nodes, H = index heads, I = index head width, N = most entries a node sees (or keys of a tile),
X = most entries closed by a node's own ancestors in this round, K = entries chosen, S = sequences
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

SELECT = {"BLOCK_N": 2048, "num_warps": 8}


@triton.jit(do_not_specialize=["num_extra", "num_entries"])
def index_scores_kernel(
    p_q,
    p_weights,
    p_keys,
    p_spans,
    p_extra,
    p_scores,
    num_extra,
    num_entries,
    stride_keys,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """Grid (sequences, tiles of entries). A tile of committed keys is fetched once for all nodes of its sequence."""
    p_span = p_spans + tl.program_id(0) * 4
    first, end, base, count = tl.load(p_span), tl.load(p_span + 1), tl.load(p_span + 2), tl.load(p_span + 3)
    o_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_h, o_i = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_I)
    m_hi = (o_h < H)[:, None] & (o_i < WIDTH)[None, :]
    m_n, m_i = o_n < num_entries, (o_i < WIDTH)[None, :]
    o_hi = o_h[:, None] * WIDTH + o_i[None, :]
    if (tl.program_id(1) + 1) * BLOCK_N <= count:
        b_key = tl.load(p_keys + (base + o_n)[:, None] * stride_keys + o_i[None, :], mask=m_i, other=0.0)
        for i_t in range(first, end):
            b_q = tl.load(p_q + i_t * (H * WIDTH) + o_hi, mask=m_hi, other=0.0).to(b_key.dtype)
            b_weight = tl.load(p_weights + i_t * H + o_h, mask=o_h < H, other=0.0).to(tl.float32)
            tl.store(p_scores + i_t * num_entries + o_n, _weighted(b_key, b_q, b_weight), mask=m_n)
    else:
        for i_t in range(first, end):
            # Beyond the committed entries come the node's own.
            o_x = o_n - count
            m_x = (o_x >= 0) & (o_x < num_extra)
            b_row = tl.load(p_extra + i_t * num_extra + o_x, mask=m_x, other=-1)
            b_row = tl.where(o_x < 0, base + o_n, b_row)
            m_key = (b_row >= 0)[:, None] & m_i
            b_key = tl.load(p_keys + b_row[:, None] * stride_keys + o_i[None, :], mask=m_key, other=0.0)
            b_q = tl.load(p_q + i_t * (H * WIDTH) + o_hi, mask=m_hi, other=0.0).to(b_key.dtype)
            b_weight = tl.load(p_weights + i_t * H + o_h, mask=o_h < H, other=0.0).to(tl.float32)
            b_score = tl.where(b_row >= 0, _weighted(b_key, b_q, b_weight), float("-inf"))
            tl.store(p_scores + i_t * num_entries + o_n, b_score, mask=m_n)


@triton.jit
def _weighted(b_key, b_q, b_weight):
    # float32 keys: three products of TF32 halves, which is float32's precision on tensor cores.
    b_dot = tl.dot(b_key, tl.trans(b_q), input_precision="tf32x3")
    return tl.sum(tl.maximum(b_dot, 0.0) * b_weight[None, :], axis=1)


@triton.jit(do_not_specialize=["num_entries", "num_extra"])
def select_entries_kernel(
    p_scores,
    p_out,
    p_base,
    p_count,
    p_extra,
    num_entries,
    num_chosen,
    num_extra,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Grid (nodes). Finds the last chosen score digit by digit, then writes the chosen in their order.

    ROWS: write the rows of the entries in place of their indices.
    """
    i_t = tl.program_id(0).to(tl.int64)
    p_scores += i_t * num_entries
    p_out += i_t * num_chosen
    o_bin = tl.arange(0, 256)
    threshold = tl.zeros((), dtype=tl.uint32)
    room = num_chosen
    for shift in tl.static_range(24, -8, -8):
        b_histogram = tl.zeros((256,), dtype=tl.int32)
        for i in range(0, num_entries, BLOCK_N):
            o_n = i + tl.arange(0, BLOCK_N)
            b_key = _ordered(tl.load(p_scores + o_n, mask=o_n < num_entries, other=float("-inf")))
            m_n = o_n < num_entries
            if shift < 24:
                m_n = m_n & ((b_key >> (shift + 8)) == (threshold >> (shift + 8)))
            b_histogram += tl.histogram(((b_key >> shift) & 255).to(tl.int32), 256, mask=m_n)
        b_at_least = tl.cumsum(b_histogram, axis=0, reverse=True)
        chosen_bin = tl.sum((b_at_least >= room).to(tl.int32), axis=0) - 1
        room -= tl.sum(tl.where(o_bin > chosen_bin, b_histogram, 0), axis=0)
        threshold = threshold | (chosen_bin.to(tl.uint32) << shift)
    ties = tl.zeros((), dtype=tl.int32)
    taken = tl.zeros((), dtype=tl.int32)
    for i in range(0, num_entries, BLOCK_N):
        o_n = i + tl.arange(0, BLOCK_N)
        b_score = tl.load(p_scores + o_n, mask=o_n < num_entries, other=float("-inf"))
        b_key = _ordered(b_score)
        b_tie = ((b_key == threshold) & (o_n < num_entries)).to(tl.int32)
        b_rank = ties + tl.cumsum(b_tie, axis=0)
        m_chosen = (b_key > threshold) | ((b_tie > 0) & (b_rank <= room))
        m_chosen = m_chosen & (b_score > float("-inf"))
        b_chosen = m_chosen.to(tl.int32)
        b_slot = taken + tl.cumsum(b_chosen, axis=0) - 1
        b_entry = o_n.to(tl.int64)
        if ROWS:
            count = tl.load(p_count + i_t)
            m_own = m_chosen & (b_entry >= count)
            b_own = tl.load(p_extra + i_t * num_extra + b_entry - count, mask=m_own, other=-1)
            b_entry = tl.where(b_entry < count, tl.load(p_base + i_t) + b_entry, b_own)
        tl.store(p_out + b_slot, b_entry, mask=m_chosen)
        ties += tl.sum(b_tie, axis=0)
        taken += tl.sum(b_chosen, axis=0)
    for i in range(0, num_chosen, BLOCK_N):
        o_k = i + tl.arange(0, BLOCK_N)
        b_none = tl.full((BLOCK_N,), -1, dtype=tl.int64)
        tl.store(p_out + o_k, b_none, mask=(o_k >= taken) & (o_k < num_chosen))


@triton.jit
def _ordered(score):
    """An unsigned key in the order of the scores, where 0 and -0 are equal."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)


def index_config(num_heads: int, width: int, dtype: torch.dtype) -> dict[str, int]:
    """Tile of `index_scores_kernel`; float32 is for comparisons."""
    half = dtype != torch.float32
    return {
        "BLOCK_N": 128 if half else 16,
        "BLOCK_H": max(16, triton.next_power_of_2(num_heads)),
        "BLOCK_I": max(16, triton.next_power_of_2(width)),
        "num_warps": 4 if half else 8,
        "num_stages": 3 if half else 2,
    }


def index_scores(
    q_THI: torch.Tensor,
    weights_TH: torch.Tensor,
    keys_RI: torch.Tensor,
    spans: Sequence[tuple[int, int, int, int]] | torch.Tensor,
    extra_rows_TX: torch.Tensor,
    num_entries: int,
) -> torch.Tensor:
    """As `kernels.indexer.index_scores`, float32. Products are of the keys' dtype, to which queries are rounded.

    spans: as there, or the same numbers as int64 `[S, 4]` on the device, so that nothing is copied to it.
    """
    assert keys_RI.dtype != torch.float64, "kernels compute in float32"
    num_nodes, num_heads, width = q_THI.shape
    scores_TN = q_THI.new_empty((num_nodes, num_entries), dtype=torch.float32)
    if not isinstance(spans, torch.Tensor):
        spans = torch.tensor(spans, dtype=torch.int64).view(-1, 4).to(q_THI.device, non_blocking=True)
    if not scores_TN.numel():
        return scores_TN
    config = index_config(num_heads, width, keys_RI.dtype)
    index_scores_kernel[(len(spans), triton.cdiv(num_entries, config["BLOCK_N"]))](
        q_THI.contiguous(),
        weights_TH.contiguous(),
        keys_RI,
        spans,
        extra_rows_TX.contiguous(),
        scores_TN,
        extra_rows_TX.shape[1],
        num_entries,
        keys_RI.stride(0),
        H=num_heads,
        WIDTH=width,
        **config,
    )
    return scores_TN


def select_entries(scores_TN: torch.Tensor, k: int) -> torch.Tensor:
    """As `kernels.indexer.select_entries`, of float32 scores."""
    return _select(scores_TN, k, None, None, None)


def select_rows(
    scores_TN: torch.Tensor, k: int, base_T: torch.Tensor, count_T: torch.Tensor, extra_rows_TX: torch.Tensor
) -> torch.Tensor:
    """The rows of `select_entries`: entry j of a node is row base + j below its count, then its own extra rows."""
    return _select(scores_TN, k, base_T, count_T, extra_rows_TX)


def _select(
    scores_TN: torch.Tensor,
    k: int,
    base_T: torch.Tensor | None,
    count_T: torch.Tensor | None,
    extra_rows_TX: torch.Tensor | None,
) -> torch.Tensor:
    assert scores_TN.dtype == torch.float32, "scores are float32"
    num_nodes, num_entries = scores_TN.shape
    chosen_TK = scores_TN.new_empty((num_nodes, min(k, num_entries)), dtype=torch.int64)
    if chosen_TK.numel():
        select_entries_kernel[(num_nodes,)](
            scores_TN.contiguous(),
            chosen_TK,
            base_T,
            count_T,
            None if extra_rows_TX is None else extra_rows_TX.contiguous(),
            num_entries,
            chosen_TK.shape[1],
            0 if extra_rows_TX is None else extra_rows_TX.shape[1],
            ROWS=base_T is not None,
            **SELECT,
        )
    return chosen_TK
