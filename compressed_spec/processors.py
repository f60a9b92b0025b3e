"""Logits processors, node by node: every tree node is processed with the history of its own path.

Shape suffixes: N nodes, V vocabulary, L tokens of a path.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressed_spec.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeHistory:
    """The tokens before the one that a node's logits predict.

    `generated_ids` are the tokens after the prompt on the node's own path, root and the node itself included.
    `eos_token_ids` are the stop tokens that min_new_tokens forbids.
    """

    prompt_ids: Sequence[int]
    generated_ids: Sequence[int]
    eos_token_ids: Sequence[int] = ()


def process_logits(
    logits_NV: Tensor, params: Sequence[SamplingParams], histories: Sequence[NodeHistory] | None = None
) -> Tensor:
    """Scores [N, V] in float32 (float64 for float64 logits) after each node's processors; the logits stay as they are.

    `params` holds one entry a node; `histories` too, and may be None if no params have processors. Raises ValueError
    for a token id outside the vocabulary and for a logits_processor that returns another shape.
    """
    assert len(params) == logits_NV.shape[0], "one SamplingParams a node"
    scores_NV = logits_NV if logits_NV.dtype == torch.float64 else logits_NV.to(torch.float32)
    rows = [n for n, p in enumerate(params) if p.has_processors]
    if not rows:
        return scores_NV
    assert histories is not None, "params with processors need each node's history"
    assert len(histories) == len(params), "one NodeHistory a node"
    scores_NV = scores_NV.clone()
    for n in rows:
        scores_NV[n] = _process_node(scores_NV[n], params[n], histories[n])
    return scores_NV


def _process_node(scores_V: Tensor, params: SamplingParams, history: NodeHistory) -> Tensor:
    device, vocab_size = scores_V.device, scores_V.shape[0]
    path_ids = [*history.prompt_ids, *history.generated_ids]

    if params.repetition_penalty != 1:
        seen = torch.tensor(_in_vocabulary(set(path_ids), vocab_size), dtype=torch.int64, device=device)
        score = scores_V[seen]
        penalty = params.repetition_penalty
        scores_V = scores_V.index_copy(0, seen, torch.where(score < 0, score * penalty, score / penalty))

    if params.frequency_penalty != 0 or params.presence_penalty != 0:
        counts = Counter(history.generated_ids)
        ids = _in_vocabulary(set(counts), vocab_size)
        seen = torch.tensor(ids, dtype=torch.int64, device=device)
        count = torch.tensor([counts[i] for i in ids], dtype=scores_V.dtype, device=device)
        penalised = scores_V[seen] - params.frequency_penalty * count - params.presence_penalty
        scores_V = scores_V.index_copy(0, seen, penalised)

    if params.logit_bias:
        biased = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=device)
        check_ids("logit_bias", params.logit_bias, vocab_size)
        bias = torch.tensor(list(params.logit_bias.values()), dtype=scores_V.dtype, device=device)
        scores_V = scores_V.index_add(0, biased, bias)

    if len(history.generated_ids) < params.min_new_tokens:
        eos = torch.tensor(_in_vocabulary(set(history.eos_token_ids), vocab_size), dtype=torch.int64, device=device)
        scores_V = scores_V.index_fill(0, eos, -math.inf)

    if params.allowed_token_ids is not None:
        check_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
        allowed = torch.tensor(params.allowed_token_ids, dtype=torch.int64, device=device)
        scores_V = torch.full_like(scores_V, -math.inf).index_copy(0, allowed, scores_V[allowed])

    if params.logits_processor is not None:
        ids_1L = torch.tensor([path_ids], dtype=torch.int64, device=device)
        processed_1V = params.logits_processor(ids_1L, scores_V[None])
        if processed_1V.shape != (1, vocab_size):
            raise ValueError(
                f"logits_processor must return scores of shape (1, {vocab_size}), got {tuple(processed_1V.shape)}."
            )
        scores_V = processed_1V[0].to(scores_V.dtype)

    return scores_V


def _in_vocabulary(token_ids: set[int], vocab_size: int) -> list[int]:
    """Ids that have a logit: an embedding may be larger than the head, and such a token cannot be generated anyway."""
    return sorted(i for i in token_ids if 0 <= i < vocab_size)


def check_ids(name: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raise ValueError if an option of this name holds a token id beyond the vocabulary."""
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise ValueError(
                f"{name} names token {token_id}, but the vocabulary ends at {vocab_size - 1}: leave it out."
            )
