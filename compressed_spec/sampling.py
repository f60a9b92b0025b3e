"""The target law at every tree node, and the token that the law and the coupled noise choose there.

Shape suffixes: N nodes, V vocabulary.

Order: processors (`compressed_spec.processors`), temperature, top-k, top-p, min-p, as transformers has it. The law is
computed in float64 from whatever the model gave. Filtered tokens have log probability -inf exactly, so they can never
be emitted.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from compressed_spec.noise import gumbel_noise, seed_tensor
from compressed_spec.processors import NodeHistory, process_logits
from compressed_spec.sampling_params import SamplingParams


def target_log_probs(
    logits_NV: Tensor, params: Sequence[SamplingParams], histories: Sequence[NodeHistory] | None = None
) -> Tensor:
    """log of the law that each node's next token is drawn from, float64 [N, V], -inf for excluded tokens.

    `params` and `histories` hold one entry a node; `histories` may be None if no params have processors, and then no
    Python runs once a node. A node at temperature 0 has all its mass on its best token. Rows do not influence each
    other. Raises ValueError if a row has NaN, +inf or nothing but -inf after its processors.
    """
    scores_NV = process_logits(logits_NV, params, histories).to(torch.float64)
    top_N1 = scores_NV.amax(dim=-1, keepdim=True)
    _check_maximum(top_N1)
    if all(p.is_greedy for p in params):
        return _one_hot_log_probs(scores_NV)
    log_p_NV = torch.log_softmax(_warp(scores_NV - top_N1, params), dim=-1)
    if any(p.is_greedy for p in params):
        greedy_N1 = torch.tensor([[p.is_greedy] for p in params], device=scores_NV.device)
        log_p_NV = torch.where(greedy_N1, _one_hot_log_probs(scores_NV), log_p_NV)
    return log_p_NV


def select_tokens(log_p_NV: Tensor, seeds_N: Tensor, positions_N: Tensor) -> Tensor:
    """The coupled choice argmax(log p + g) at every node, int64 [N], on the device of `log_p_NV`.

    `seeds_N`, `positions_N`: int64 [N], as `gumbel_noise` takes them. A row whose law is one token gives that token.
    """
    noise_NV = gumbel_noise(seeds_N, positions_N, log_p_NV.shape[-1], log_p_NV.device)
    return noise_NV.add_(log_p_NV).argmax(dim=-1)


def greedy_tokens(scores_NV: Tensor) -> Tensor:
    """The best token of every row, int64 [N], the smallest id on a tie. Raises ValueError as `target_log_probs`."""
    best_N1 = scores_NV.argmax(dim=-1, keepdim=True)  # of a row with a NaN, its index
    _check_maximum(scores_NV.gather(1, best_N1))
    return best_N1[:, 0]


def target_tokens(
    logits_NV: Tensor,
    params: Sequence[SamplingParams],
    positions_N: Tensor,
    histories: Sequence[NodeHistory] | None = None,
) -> Tensor:
    """The target's own token after every node, int64 [N]: the best at temperature 0, else the coupled choice.

    `positions_N`, int64 [N], is the index in prompt + output of the token being chosen. A token depends on its own
    row alone, so plain sampling, any tree and any batch choose the same from equal logits.
    """
    if all(p.is_greedy for p in params):
        return greedy_tokens(process_logits(logits_NV, params, histories))
    log_p_NV = target_log_probs(logits_NV, params, histories)
    return select_tokens(log_p_NV, seed_tensor([p.seed for p in params], log_p_NV.device), positions_N)


def _check_maximum(top_N1: Tensor) -> None:
    for row, [top] in enumerate(top_N1.tolist()):
        if not math.isfinite(top):
            what = "no token with a finite score" if top == -math.inf else f"a score of {top}"
            raise ValueError(f"Row {row} of the logits has {what}; check the processors, or the model's output.")


def _one_hot_log_probs(scores_NV: Tensor) -> Tensor:
    best_N1 = scores_NV.argmax(dim=-1, keepdim=True)
    return torch.full_like(scores_NV, -math.inf).scatter_(1, best_N1, 0.0)


def _warp(scores_NV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Temperature and filters. Every row's maximum is 0, so no temperature, however small, can overflow upwards."""
    device, vocab_size = scores_NV.device, scores_NV.shape[-1]

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=device)[:, None]

    scores_NV = scores_NV / column([p.temperature or 1.0 for p in params])
    sampled = [(n, p) for n, p in enumerate(params) if not p.is_greedy]

    if rows := [n for n, p in sampled if 0 < p.top_k < vocab_size]:
        ranks = torch.tensor([[params[n].top_k - 1] for n in rows], device=device)
        largest = scores_NV[rows].topk(max(params[n].top_k for n in rows), dim=-1).values
        scores_NV[rows] = _drop(scores_NV[rows], scores_NV[rows] < largest.gather(1, ranks))

    if rows := [n for n, p in sampled if p.top_p < 1]:
        # Ascending, and of equal scores the larger id first: it is dropped first, whatever the sort does elsewhere.
        ordered = scores_NV[rows].sort(dim=-1, descending=True, stable=True)
        below = ordered.values.flip(-1).softmax(dim=-1).cumsum(dim=-1) <= column([1 - params[n].top_p for n in rows])
        below[:, -1] = False
        scores_NV[rows] = _drop(scores_NV[rows], below.scatter(1, ordered.indices.flip(-1), below))

    if rows := [n for n, p in sampled if p.min_p > 0]:
        probs = scores_NV[rows].softmax(dim=-1)
        floor = column([params[n].min_p for n in rows]) * probs.amax(dim=-1, keepdim=True)
        scores_NV[rows] = _drop(scores_NV[rows], probs < floor)

    return scores_NV


def _drop(scores: Tensor, dropped: Tensor) -> Tensor:
    return scores.masked_fill(dropped, -math.inf)
