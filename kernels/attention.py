"""Attention of each node over listed rows: its window and its compressed entries, jointly, with a sink a head.

R = pool rows, T = nodes, H = heads, D = head width, W = window, K = compressed entries listed, G = nodes of a tile,
N = blocks of rows, B = rows of a block
"""

import torch
import torch.nn.functional as F

from compressed_spec.kernels.fp8_rows import decode_rows
from compressed_spec.kernels.gather import gather_rows
from compressed_spec.kernels.rowwise import ROW_TILE, join_tiles, row_tiles

KEY_BLOCK = 64  # rows whose weights and values are summed as one


def sparse_attention(
    q_THD: torch.Tensor,
    window_RD: torch.Tensor,
    window_rows_TW: torch.Tensor,
    compressed_RD: torch.Tensor | None,
    compressed_rows_TK: torch.Tensor | None,
    sink_H: torch.Tensor,
    num_rotated: int = 0,
) -> torch.Tensor:
    """`softmax(q k / sqrt(D))` with `exp(sink)` added to the denominator, times k (K = V), as `[T, H, D]`.

    Row -1 reads nothing. Scores and probabilities are float32 or wider. Pools of uint8 hold FP8 rows, the last
    `num_rotated` channels rotated (see `kernels.fp8_rows`).
    """
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    kv_TKD, rows_TK = _kv_rows(window_RD, window_rows_TW, q_THD, num_rotated), window_rows_TW
    if compressed_RD is not None and compressed_rows_TK is not None:
        kv_TKD = torch.cat((kv_TKD, _kv_rows(compressed_RD, compressed_rows_TK, q_THD, num_rotated)), dim=1)
        rows_TK = torch.cat((rows_TK, compressed_rows_TK), dim=1)
    scores_THK = torch.bmm(q_THD, kv_TKD.transpose(1, 2)).to(wide) * q_THD.shape[-1] ** -0.5
    scores_THK = scores_THK.masked_fill((rows_TK < 0).unsqueeze(1), float("-inf"))
    sink_TH1 = sink_H.to(wide).view(1, -1, 1).expand(scores_THK.shape[0], -1, -1)
    probs_THK = torch.softmax(torch.cat((scores_THK, sink_TH1), dim=-1), dim=-1)[..., :-1]
    return torch.bmm(probs_THK.to(kv_TKD.dtype), kv_TKD)


def _kv_rows(pool_RX: torch.Tensor, rows: torch.Tensor, q_THD: torch.Tensor, num_rotated: int) -> torch.Tensor:
    """Rows `[..., D]` in the queries' dtype, decoded if they are bytes."""
    found = gather_rows(pool_RX, rows)
    if pool_RX.dtype != torch.uint8:
        return found
    decoded_ND = decode_rows(found.flatten(0, -2), q_THD.shape[-1], num_rotated).to(q_THD.dtype)
    return decoded_ND.view(*rows.shape, -1)


def rowwise_attention(
    q_THD: torch.Tensor,
    window_RD: torch.Tensor,
    window_rows_TW: torch.Tensor,
    compressed_RD: torch.Tensor | None,
    compressed_rows_TK: torch.Tensor | None,
    sink_H: torch.Tensor,
    num_rotated: int = 0,
) -> torch.Tensor:
    """`sparse_attention`, such that a node's bits do not depend on the other nodes or on how long their lists are.

    The two lists are cut into blocks of `KEY_BLOCK` (window by ring slot, entries ascending, each filled up with -1).
    Every product has one shape, and the sums of blocks are added in their order, so that a block of -1 adds zeros.
    """
    tiles = [_row_blocks(window_RD, window_rows_TW)]
    if compressed_RD is not None and compressed_rows_TK is not None:
        tiles.append(_row_blocks(compressed_RD, compressed_rows_TK))
    outputs = []
    for i, q_GHD in enumerate(row_tiles(q_THD)):
        span = slice(i * ROW_TILE, (i + 1) * ROW_TILE)
        kv_NGBD = torch.cat([_kv_rows(pool, rows_NTB[:, span], q_THD, num_rotated) for pool, rows_NTB in tiles])
        empty_NGB = torch.cat([rows_NTB[:, span] < 0 for _, rows_NTB in tiles])
        outputs.append(_attend_blocks(q_GHD, kv_NGBD, empty_NGB, sink_H))
    return join_tiles(outputs, len(q_THD))


def _row_blocks(pool_RD: torch.Tensor, rows_TK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A pool, and its listed rows as `[blocks, nodes, KEY_BLOCK]`, both axes filled up with -1."""
    num_nodes, length = rows_TK.shape
    rows_TK = F.pad(rows_TK, (0, -length % KEY_BLOCK, 0, -num_nodes % ROW_TILE), value=-1)
    return pool_RD, rows_TK.view(len(rows_TK), rows_TK.shape[1] // KEY_BLOCK, KEY_BLOCK).transpose(0, 1)


def _attend_blocks(
    q_GHD: torch.Tensor, kv_NGBD: torch.Tensor, empty_NGB: torch.Tensor, sink_H: torch.Tensor
) -> torch.Tensor:
    wide = torch.promote_types(q_GHD.dtype, torch.float32)
    scores_NGHB = torch.stack([torch.bmm(q_GHD, kv_GBD.transpose(1, 2)) for kv_GBD in kv_NGBD])
    scores_NGHB = scores_NGHB.to(wide) * q_GHD.shape[-1] ** -0.5
    scores_NGHB = scores_NGHB.masked_fill(empty_NGB.unsqueeze(2), float("-inf"))
    sink_H = sink_H.to(wide)
    peak_GH = torch.maximum(scores_NGHB.amax((0, 3)), sink_H)
    weights_NGHB = torch.exp(scores_NGHB - peak_GH.unsqueeze(-1))
    total_GH = torch.exp(sink_H - peak_GH)
    # From +0.0, because -0.0 would turn into it at the first block of zeros.
    output_GHD = torch.zeros_like(q_GHD, dtype=wide)
    for weights_GHB, kv_GBD in zip(weights_NGHB, kv_NGBD, strict=True):
        total_GH = total_GH + weights_GHB.sum(-1)
        output_GHD = output_GHD + torch.bmm(weights_GHB.to(kv_GBD.dtype), kv_GBD).to(wide)
    return (output_GHD / total_GH.unsqueeze(-1)).to(kv_NGBD.dtype)
