"""What a decoder is asked for, and what it hands back."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from compressed_spec.accepting import Logprobs
from compressed_spec.processors import check_ids
from compressed_spec.sampling_params import SamplingParams
from compressed_spec.target import TargetModel

StopCheck = Callable[[Sequence[int], Sequence[int]], int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One text to continue.

    stop_token_ids: end the text, included in it. stop_check: told the output so far and the tokens of the round, says
    how many of these to keep if the text ends there (stop strings), else None; after an exception it may be told the
    same round again. logprobs: which log probabilities to give, None for none.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_new_tokens: int
    stop_token_ids: frozenset[int]
    stop_check: StopCheck | None = None
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Tokens that a request emitted in one round.

    request: its number, in order of submission. logprobs: of each token, if the request wants them. num_accepted: how
    many of the tokens were drafted (they come first). finish_reason: "stop" or "length" if it ends here.
    """

    request: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    num_accepted: int
    finish_reason: str | None


def check_request(model: TargetModel, request: Request) -> None:
    """Raise ValueError for an empty prompt, a token id out of range, no token to generate, or more than fit."""
    if not request.prompt_ids:
        raise ValueError("A prompt is empty: give at least one token id, such as the BOS token.")
    if not isinstance(request.max_new_tokens, int) or request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be an int of at least 1, got {request.max_new_tokens!r}.")
    model.check_tokens(request.prompt_ids)
    check_ids("logit_bias", request.params.logit_bias or (), model.vocab_size)
    check_ids("allowed_token_ids", request.params.allowed_token_ids or (), model.vocab_size)
    if len(request.prompt_ids) + request.max_new_tokens - 1 > model.max_position_embeddings:
        raise ValueError(
            f"A prompt of {len(request.prompt_ids)} tokens and {request.max_new_tokens} new ones go beyond the model's "
            f"{model.max_position_embeddings} positions: shorten the prompt or lower max_new_tokens."
        )
