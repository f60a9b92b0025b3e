"""From a round's logits to the tokens that each request emits.

T = nodes of all trees, B = trees, V = vocabulary
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch

from compressed_spec.processors import NodeHistory
from compressed_spec.sampling import target_log_probs, target_tokens
from compressed_spec.sampling_params import SamplingParams
from compressed_spec.verifying import (
    Acceptance,
    CoupledVerifier,
    DraftTree,
    GreedyVerifier,
    TargetVerifier,
    Verifier,
    verify_coins,
    walk,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a request's next tokens depend on besides logits: its options and its text so far (the root included)."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    eos_token_ids: Sequence[int]

    def history(self, path_ids: Sequence[int] = ()) -> NodeHistory:
        """The history of a node whose path from the root (not included) is `path_ids`."""
        return NodeHistory(
            prompt_ids=self.prompt_ids,
            generated_ids=[*self.output_ids, *path_ids],
            eos_token_ids=self.eos_token_ids,
        )


def first_tokens(logits_BV: torch.Tensor, contexts: Sequence[Context]) -> list[int]:
    """The first token of each request, after its prompt."""
    positions_B = torch.tensor([len(c.prompt_ids) for c in contexts], device=logits_BV.device)
    histories = [c.history() for c in contexts]
    return target_tokens(logits_BV, [c.params for c in contexts], positions_B, histories).tolist()


class Logprobs(StrEnum):
    """What a token's log probability refers to."""

    RAW = "raw"  # the model's logits alone
    FILTERED = "filtered"  # the law that it was drawn from: after processors, temperature and filters (0.0 if greedy)


def token_logprobs(
    logits_NV: torch.Tensor, token_ids: Sequence[int], context: Context, kind: Logprobs
) -> tuple[float, ...]:
    """Log probability of each of a request's consecutive tokens, under the logits `[N, V]` that it followed."""
    if kind is Logprobs.RAW:
        log_p_NV = torch.log_softmax(logits_NV.double(), dim=-1)
    else:
        histories = [context.history(token_ids[:n]) for n in range(len(token_ids))]
        log_p_NV = target_log_probs(logits_NV, [context.params] * len(token_ids), histories)
    tokens_N1 = torch.tensor(token_ids, device=logits_NV.device).unsqueeze(1)
    return tuple(log_p_NV.gather(1, tokens_N1)[:, 0].tolist())


def kept_tokens(
    tokens: Sequence[int],
    remaining: int,
    stop_token_ids: Container[int],
    stop_check: Callable[[Sequence[int]], int | None] | None,
) -> tuple[list[int], str | None]:
    """A round's tokens up to the text's end, and why it ends there, if it does: "stop" or "length".

    remaining: most tokens. stop_check: told the tokens so kept, how many of them to keep if the text ends there.
    """
    kept = list(tokens[:remaining])
    reason = "length" if len(kept) == remaining else None
    for index, token in enumerate(kept):
        if token in stop_token_ids:
            kept, reason = kept[: index + 1], "stop"
            break
    count = None if stop_check is None else stop_check(kept)
    return (kept, reason) if count is None else (kept[:count], "stop")


def accept(
    logits_TV: torch.Tensor, drafts: Sequence[DraftTree], contexts: Sequence[Context], verifier: Verifier
) -> list[Acceptance]:
    """The accepted path and the next token of each tree; requests at temperature 0 take the target's best token."""
    params = [c.params for c, draft in zip(contexts, drafts, strict=True) for _ in range(len(draft.tree))]
    histories = None
    if any(c.params.has_processors for c in contexts):
        histories = [
            c.history([draft.tree.tokens[node] for node in draft.tree.path_to(end)[1:]])
            for c, draft in zip(contexts, drafts, strict=True)
            for end in range(len(draft.tree))
        ]
    if isinstance(verifier, CoupledVerifier) or all(c.params.is_greedy for c in contexts):
        positions_T = torch.tensor(
            [
                len(c.prompt_ids) + len(c.output_ids) + depth
                for c, draft in zip(contexts, drafts, strict=True)
                for depth in draft.tree.depths
            ],
            device=logits_TV.device,
        )
        chosen = target_tokens(logits_TV, params, positions_T, histories).tolist()
        ends = _ends(drafts)
        return [walk(draft.tree, chosen[end - len(draft.tree) : end]) for draft, end in zip(drafts, ends, strict=True)]
    log_p_TV = target_log_probs(logits_TV, params, histories)
    results = []
    for draft, context, end in zip(drafts, contexts, _ends(drafts), strict=True):
        # A root alone (a last token, a drafter that had nothing) brings no law of drafts for a rule to compare with.
        rule = TargetVerifier() if len(draft.tree) == 1 else verifier
        rule = GreedyVerifier() if context.params.is_greedy else rule
        coins = verify_coins(context.params.seed, len(context.prompt_ids) + len(context.output_ids))
        results.append(rule.verify(draft, log_p_TV[end - len(draft.tree) : end], coins))
    return results


def _ends(drafts: Sequence[DraftTree]) -> list[int]:
    ends, end = [], 0
    for draft in drafts:
        end += len(draft.tree)
        ends.append(end)
    return ends
