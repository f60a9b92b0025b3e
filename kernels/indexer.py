"""The lightning indexer: score compressed entries for each node, and choose among them (paper section 2.3.1).

R = pool rows, T = nodes, H = index heads, I = index head width, N = most entries a node sees, X = most entries closed
by a node's own ancestors in this round, K = entries chosen (or keys of a tile), G = nodes of a tile, J = G H,
S = nodes of a sequence
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from compressed_spec.kernels.gather import gather_rows
from compressed_spec.kernels.rowwise import ROW_TILE, join_tiles, row_tiles

KEY_TILE = 64  # keys of one product


def index_scores(
    q_THI: torch.Tensor,
    weights_TH: torch.Tensor,
    keys_RI: torch.Tensor,
    spans: Sequence[tuple[int, int, int, int]],
    extra_rows_TX: torch.Tensor,
    num_entries: int,
) -> torch.Tensor:
    """`sum_h w_h relu(q_h . k_j)` as `[T, N]`, column = entry index; -inf where a node does not see the entry.

    `spans` has one (first node, end node, base row, count) a sequence: its nodes see the contiguous committed rows
    base .. base + count, then their own `extra_rows_TX` (-1 = nothing), which continue the count. Keys may be narrower
    than queries and weights, whose dtype the sums are taken in.
    """
    scores_TN = q_THI.new_full((q_THI.shape[0], num_entries), float("-inf"))
    for first, end, base, count in spans:
        keys_NI = keys_RI[base : base + count].to(q_THI.dtype)
        committed = torch.relu(torch.matmul(q_THI[first:end], keys_NI.T))
        scores_TN[first:end, :count] = torch.einsum("thn,th->tn", committed, weights_TH[first:end])
        num_extra = min(extra_rows_TX.shape[1], num_entries - count)
        rows = extra_rows_TX[first:end, :num_extra]
        own_keys_TXI = gather_rows(keys_RI, rows).to(q_THI.dtype)
        own = torch.relu(torch.einsum("thi,txi->thx", q_THI[first:end], own_keys_TXI))
        own = torch.einsum("thx,th->tx", own, weights_TH[first:end])
        scores_TN[first:end, count : count + num_extra] = own.masked_fill(rows < 0, float("-inf"))
    return scores_TN


def gathered_index_scores(
    q_THI: torch.Tensor, weights_TH: torch.Tensor, keys_RI: torch.Tensor, rows_TN: torch.Tensor
) -> torch.Tensor:
    """`index_scores` where each node's keys are listed, `[T, N]` rows in the order of entries (-1 = not in sight)."""
    keys_TNI = gather_rows(keys_RI, rows_TN).to(q_THI.dtype)
    scores_THN = torch.relu(torch.bmm(q_THI, keys_TNI.transpose(1, 2)))
    scores_TN = (scores_THN * weights_TH.unsqueeze(-1)).sum(1)
    return scores_TN.masked_fill(rows_TN < 0, float("-inf"))


def select_entries(scores_TN: torch.Tensor, k: int) -> torch.Tensor:
    """Entry indices `[T, K]`, ascending, -1 after the last: the k best by (score descending, index ascending).

    The tie rule makes the choice a function of the node alone: it does not depend on how many columns there are.
    """
    num_nodes, num_entries = scores_TN.shape
    k = min(k, num_entries)
    kth = scores_TN.topk(k, dim=-1, sorted=True).values[:, -1:]
    better, tied = scores_TN > kth, scores_TN == kth
    room = k - better.sum(-1, keepdim=True)
    chosen = (better | (tied & (tied.cumsum(-1) <= room))) & (scores_TN > float("-inf"))
    slots = torch.where(chosen, chosen.cumsum(-1) - 1, k)
    entries = torch.arange(num_entries, device=scores_TN.device).expand(num_nodes, -1)
    return entries.new_full((num_nodes, k + 1), -1).scatter_(1, slots, entries)[:, :k]


def rowwise_index_scores(
    q_THI: torch.Tensor,
    weights_TH: torch.Tensor,
    keys_RI: torch.Tensor,
    spans: Sequence[tuple[int, int, int, int]],
    extra_rows_TX: torch.Tensor,
    num_entries: int,
) -> torch.Tensor:
    """`index_scores`, such that a score depends on its node and its key alone, committed or not.

    Every product is of `KEY_TILE` keys by the heads of `ROW_TILE` nodes of one sequence.
    """
    scores_TN = q_THI.new_full((q_THI.shape[0], num_entries), float("-inf"))
    for first, end, base, count in spans:
        rows_SX = extra_rows_TX[first:end, : num_entries - count]
        own_rows = rows_SX[rows_SX >= 0]
        # A sequence's new keys lie side by side, so they are scored as a range too, and each node takes its own.
        low, high = (int(own_rows.min()), int(own_rows.max()) + 1) if len(own_rows) else (0, 0)
        for start in range(first, end, ROW_TILE):
            nodes = slice(start, min(start + ROW_TILE, end))
            q_GHI, weights_GH = row_tiles(q_THI[nodes])[0], row_tiles(weights_TH[nodes])[0]
            num_nodes = nodes.stop - nodes.start
            committed_GN = _tile_scores(q_GHI, weights_GH, keys_RI[base : base + count])
            scores_TN[nodes, :count] = committed_GN[:num_nodes]
            if high:
                rows_GX = rows_SX[start - first : nodes.stop - first]
                new_GN = _tile_scores(q_GHI, weights_GH, keys_RI[low:high])[:num_nodes]
                own_GX = new_GN.gather(1, (rows_GX - low).clamp(min=0)).masked_fill(rows_GX < 0, float("-inf"))
                scores_TN[nodes, count : count + own_GX.shape[1]] = own_GX
    return scores_TN


def _tile_scores(q_GHI: torch.Tensor, weights_GH: torch.Tensor, keys_NI: torch.Tensor) -> torch.Tensor:
    """Scores `[G, N]` of any number of keys for one tile of nodes."""
    heads_JI = q_GHI.flatten(0, 1)
    parts = [
        (torch.relu(F.linear(keys_KI, heads_JI)).unflatten(1, weights_GH.shape) * weights_GH).sum(-1)
        for keys_KI in row_tiles(keys_NI.to(q_GHI.dtype), KEY_TILE)
    ]
    return join_tiles(parts, len(keys_NI)).T
