"""Attention of whole packed rows in dense form: what `models.deepseek_v4.attention` computes over row lists.

Rows start at position 0 and have a multiple of the sliding window's and of every ratio's tokens.

B = rows, L = tokens a row, T = B L, W = sliding window, H = heads, E = entry width, N = entries, P = rotated pairs,
D = model width, S = chained draft steps
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from compressed_spec.kernels.norm import rms_norm
from compressed_spec.kernels.rope import apply_rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What the dense form must know beside the weights: row length, window, heads and their widths, ratio, top-k."""

    length: int
    window: int
    num_heads: int
    groups: int
    eps: float
    ratio: int = 0
    index_heads: int = 0
    index_topk: int = 0


Weights = dict[str, torch.Tensor]


def _rope(x_THD: torch.Tensor, cos_LP: torch.Tensor, sin_LP: torch.Tensor) -> torch.Tensor:
    repeat = x_THD.shape[0] // cos_LP.shape[0]
    return apply_rope(x_THD, cos_LP.repeat(repeat, 1), sin_LP.repeat(repeat, 1))


def queries(h_TD: torch.Tensor, w: Weights, cos: torch.Tensor, sin: torch.Tensor, geo: Geometry) -> torch.Tensor:
    """Rotated queries `[T, H, E]`."""
    qr_TD = rms_norm(F.linear(h_TD, w["wq_a.weight"]), w["q_norm.weight"], geo.eps)
    q_THE = F.linear(qr_TD, w["wq_b.weight"]).unflatten(-1, (geo.num_heads, -1))
    return _rope(rms_norm(q_THE, None, geo.eps), cos, sin)


def keys(h_TD: torch.Tensor, w: Weights, cos: torch.Tensor, sin: torch.Tensor, geo: Geometry) -> torch.Tensor:
    """Rotated K = V rows `[T, E]`."""
    kv_TE = rms_norm(F.linear(h_TD, w["wkv.weight"]), w["kv_norm.weight"], geo.eps)
    return _rope(kv_TE.unsqueeze(1), cos, sin).squeeze(1)


def project_out(o_THE: torch.Tensor, w: Weights, cos: torch.Tensor, sin: torch.Tensor, geo: Geometry) -> torch.Tensor:
    """Undo the rotation and apply the grouped low-rank output projection, `[T, D]`."""
    o_TGE = _rope(o_THE, cos, -sin).flatten(1).unflatten(-1, (geo.groups, -1))
    low_GTR = torch.bmm(o_TGE.transpose(0, 1), w["wo_a.weight"].unflatten(0, (geo.groups, -1)).transpose(1, 2))
    return F.linear(low_GTR.transpose(0, 1).flatten(1), w["wo_b.weight"])


def _window_keys(kv_TE: torch.Tensor, geo: Geometry) -> torch.Tensor:
    """Each chunk of W tokens with the chunk before it, `[B L / W, 2 W, E]`."""
    chunks = kv_TE.unflatten(0, (-1, geo.length // geo.window, geo.window))
    before = F.pad(chunks[:, :-1], (0, 0, 0, 0, 1, 0))
    return torch.cat((before, chunks), dim=2).flatten(0, 1)


def _window_scores(
    q_THE: torch.Tensor, keys_CWE: torch.Tensor, geo: Geometry, skip: torch.Tensor | int = 0
) -> torch.Tensor:
    """Scaled scores of the window, -inf for keys that a query does not see, `[T, H, 2 W]`.

    skip: positions less at the far end.
    """
    chunks = keys_CWE.shape[0]
    q_CQE = q_THE.flatten(0, 1).unflatten(0, (chunks, -1))
    scores = torch.bmm(q_CQE, keys_CWE.transpose(1, 2)).unflatten(1, (geo.window, geo.num_heads))
    query = torch.arange(geo.window).view(1, -1, 1, 1)
    key = torch.arange(2 * geo.window).view(1, 1, 1, -1)
    first = torch.arange(chunks).view(-1, 1, 1, 1) % (geo.length // geo.window) == 0
    hidden = (key > query + geo.window) | (key <= query + skip) | (first & (key < geo.window))
    masked: torch.Tensor = (scores * q_THE.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))
    return masked.flatten(0, 1)


def _softmax(scores: list[torch.Tensor], sink_H: torch.Tensor) -> list[torch.Tensor]:
    """Joint softmax of score blocks `[T, H, n]` and the sink."""
    sink = sink_H.view(1, -1, 1).expand(scores[0].shape[0], -1, 1)
    probs = torch.softmax(torch.cat((*scores, sink), dim=-1), dim=-1)
    return list(probs[..., :-1].split([block.shape[-1] for block in scores], dim=-1))


def _window_output(probs_THW: torch.Tensor, keys_CWE: torch.Tensor, geo: Geometry) -> torch.Tensor:
    p_CQW = probs_THW.flatten(0, 1).unflatten(0, (keys_CWE.shape[0], -1))
    output: torch.Tensor = torch.bmm(p_CQW, keys_CWE).flatten(0, 1).unflatten(0, (-1, geo.num_heads))
    return output


def sliding_attention(
    h_TD: torch.Tensor, w: Weights, cos: torch.Tensor, sin: torch.Tensor, geo: Geometry
) -> tuple[torch.Tensor, torch.Tensor]:
    """A sliding layer's output `[T, D]`, and its K = V rows `[T, E]`."""
    q_THE, kv_TE = queries(h_TD, w, cos, sin, geo), keys(h_TD, w, cos, sin, geo)
    keys_CWE = _window_keys(kv_TE, geo)
    (probs,) = _softmax([_window_scores(q_THE, keys_CWE, geo)], w["attn_sink"])
    return project_out(_window_output(probs, keys_CWE, geo), w, cos, sin, geo), kv_TE


def chained_attention(
    h_TD: torch.Tensor,
    w: Weights,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_TE: torch.Tensor,
    earlier_TSE: torch.Tensor,
    step: torch.Tensor,
    geo: Geometry,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A draft head's attention at a later chain step (cos, sin at its positions): output `[T, D]` and its own rows.

    kv_TE: rows made from the target's streams; a chain sees those up to its start, then rows of its own. step: how many
    steps were before (1 or more); earlier_TSE: rows of those after the first, whatever lies in the other slots.
    """
    q_THE, own_TE = queries(h_TD, w, cos, sin, geo), keys(h_TD, w, cos, sin, geo)
    keys_CWE, rows_TSE = _window_keys(kv_TE, geo), torch.cat((earlier_TSE, own_TE.unsqueeze(1)), dim=1)
    num_slots = rows_TSE.shape[1]
    slot = torch.arange(num_slots)
    unused = (slot >= step - 1) & (slot < num_slots - 1)
    own_scores = (q_THE.unsqueeze(2) * rows_TSE.unsqueeze(1)).sum(-1) * q_THE.shape[-1] ** -0.5
    own_scores = own_scores.masked_fill(unused, float("-inf"))
    probs = _softmax([_window_scores(q_THE, keys_CWE, geo, step), own_scores], w["attn_sink"])
    o_THE = _window_output(probs[0], keys_CWE, geo) + (probs[1].unsqueeze(-1) * rows_TSE.unsqueeze(1)).sum(2)
    return project_out(o_THE, w, cos, sin, geo), own_TE


def compress(
    h_TD: torch.Tensor, w: Weights, lane: str, cos: torch.Tensor, sin: torch.Tensor, geo: Geometry, *, overlap: bool
) -> torch.Tensor:
    """All compressed entries of each row, normed and rotated, `[B, N, E]`."""
    num = geo.length // geo.ratio
    kv = F.linear(h_TD, w[f"{lane}wkv.weight"]).unflatten(0, (-1, num, geo.ratio))
    gate = F.linear(h_TD, w[f"{lane}wgate.weight"]).unflatten(0, (-1, num, geo.ratio)) + w[f"{lane}ape"]
    if overlap:
        half = kv.shape[-1] // 2
        older_kv = F.pad(kv[:, :-1, :, :half], (0, 0, 0, 0, 1, 0))
        older_gate = F.pad(gate[:, :-1, :, :half], (0, 0, 0, 0, 1, 0), value=float("-inf"))
        kv, gate = torch.cat((older_kv, kv[..., half:]), dim=2), torch.cat((older_gate, gate[..., half:]), dim=2)
    pooled_BNE = (kv * torch.softmax(gate, dim=2)).sum(2)
    normed = rms_norm(pooled_BNE, w[f"{lane}norm.weight"], geo.eps)
    return _rope(normed.flatten(0, 1).unsqueeze(1), cos[:: geo.ratio], sin[:: geo.ratio]).view_as(normed)


def hidden_entries(geo: Geometry) -> torch.Tensor:
    """`[L, N]`, true where a token does not see an entry yet."""
    visible_L1 = (torch.arange(geo.length).unsqueeze(1) + 1) // geo.ratio
    return torch.arange(geo.length // geo.ratio).unsqueeze(0) >= visible_L1


def index_scores(h_TD: torch.Tensor, w: Weights, cos: torch.Tensor, sin: torch.Tensor, geo: Geometry) -> torch.Tensor:
    """The indexer's scores of all entries `[B, L, N]`; its inputs are cut from the graph."""
    h_TD = h_TD.detach()
    qr_TD = rms_norm(F.linear(h_TD, w["wq_a.weight"]), w["q_norm.weight"], geo.eps).detach()
    q_THI = _rope(F.linear(qr_TD, w["indexer.wq_b.weight"]).unflatten(-1, (geo.index_heads, -1)), cos, sin)
    keys_BNI = compress(h_TD, w, "indexer.compressor.", cos, sin, geo, overlap=True)
    weights_TH = F.linear(h_TD, w["indexer.weights_proj.weight"]) * (q_THI.shape[-1] * geo.index_heads) ** -0.5
    scores = torch.relu(torch.bmm(q_THI.flatten(0, 1).unflatten(0, (len(keys_BNI), -1)), keys_BNI.transpose(1, 2)))
    scores_BLHN = scores.unflatten(1, (geo.length, geo.index_heads))
    summed: torch.Tensor = (scores_BLHN * weights_TH.unflatten(0, (-1, geo.length)).unsqueeze(-1)).sum(2)
    return summed


def compressed_attention(
    h_TD: torch.Tensor, w: Weights, cos: torch.Tensor, sin: torch.Tensor, geo: Geometry, select: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """An HCA layer's (`index_heads` 0) or CSA layer's output `[T, D]`, and the indexer's loss.

    select: bool, whether the indexer's choice counts, or every visible entry is attended to. The loss is the mean KL of
    the indexer's law over the attended entries from the attention's mass on them (cut from the graph).
    """
    q_THE, keys_CWE = queries(h_TD, w, cos, sin, geo), _window_keys(keys(h_TD, w, cos, sin, geo), geo)
    csa = geo.index_heads > 0
    entries_BNE = compress(h_TD, w, "compressor.", cos, sin, geo, overlap=csa)
    hidden_BLN = hidden_entries(geo).unsqueeze(0).expand(len(entries_BNE), -1, -1)
    scores_BLN = h_TD.new_zeros(())
    if csa:
        scores_BLN = index_scores(h_TD, w, cos, sin, geo).masked_fill(hidden_BLN, float("-inf"))
        if entries_BNE.shape[1] > geo.index_topk:
            kth = scores_BLN.detach().topk(geo.index_topk, dim=-1).values[..., -1:]
            hidden_BLN = hidden_BLN | (select & (scores_BLN < kth))
    q_BQE = q_THE.flatten(0, 1).unflatten(0, (len(entries_BNE), -1))
    scores = torch.bmm(q_BQE, entries_BNE.transpose(1, 2)) * q_THE.shape[-1] ** -0.5
    scores_THN = scores.unflatten(1, (geo.length, geo.num_heads)).masked_fill(hidden_BLN.unsqueeze(2), float("-inf"))
    probs = _softmax([_window_scores(q_THE, keys_CWE, geo), scores_THN.flatten(0, 1)], w["attn_sink"])
    p_BQN = probs[1].flatten(0, 1).unflatten(0, (len(entries_BNE), -1))
    o_THE = _window_output(probs[0], keys_CWE, geo) + torch.bmm(p_BQN, entries_BNE).view_as(q_THE)
    loss = h_TD.new_zeros(())
    if csa:
        mass_BLN = probs[1].detach().sum(1).view_as(scores_BLN) + 1e-9
        mass_BLN = mass_BLN.masked_fill(hidden_BLN, 0.0)
        law = mass_BLN / mass_BLN.sum(-1, keepdim=True).clamp(min=1e-9)
        log_law = (law + 1e-9).log()
        log_index = scores_BLN.masked_fill(hidden_BLN, -1e4).log_softmax(-1)
        loss = (law * (log_law - log_index)).sum(-1).mean()
    return project_out(o_THE, w, cos, sin, geo), loss
