"""What a request asks of the sampler, in Hugging Face's names, checked when it is built."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling options; defaults are greedy decoding without processors.

    They act in this order: repetition, frequency and presence penalty, logit bias, min_new_tokens, allowed_token_ids,
    logits_processor; then temperature, top-k, top-p, min-p. Each has transformers' meaning where transformers has it;
    presence_penalty, frequency_penalty, logit_bias and allowed_token_ids have vLLM's, the first two over generated
    tokens only.

    * temperature 0 takes the most probable token after the processors, the smallest id on a tie; the filters then say
      nothing.
    * top_k 0, top_p 1 and min_p 0 filter nothing.
    * logits_processor is called as f(ids [1, L], scores [1, V]) -> scores [1, V] once a tree node, with the ids of
      that node's own path from the prompt on, so a transformers LogitsProcessorList fits. It must keep no state
      between calls.
    * seed is this request's own; any int, counted modulo 2**64.

    Raises ValueError for a value outside its range, NaN included.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    min_new_tokens: int = 0
    allowed_token_ids: tuple[int, ...] | None = None
    logits_processor: LogitsProcessor | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature, lambda t: t >= 0, "a finite number of at least 0")
        _check_number("top_p", self.top_p, lambda p: 0 < p <= 1, "a number in (0, 1]")
        _check_number("min_p", self.min_p, lambda p: 0 <= p <= 1, "a number in [0, 1]")
        _check_number("repetition_penalty", self.repetition_penalty, lambda r: r > 0, "a number above 0")
        _check_number("presence_penalty", self.presence_penalty, math.isfinite, "a finite number")
        _check_number("frequency_penalty", self.frequency_penalty, math.isfinite, "a finite number")
        _check_int("top_k", self.top_k, minimum=0)
        _check_int("min_new_tokens", self.min_new_tokens, minimum=0)
        _check_int("seed", self.seed, minimum=None)
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", dict(self.logit_bias))
            for token_id, bias in self.logit_bias.items():
                _check_int("a token id in logit_bias", token_id, minimum=0)
                if not isinstance(bias, int | float) or math.isnan(bias) or bias == math.inf:
                    raise ValueError(f"logit_bias of token {token_id} must be a number below infinity, got {bias!r}.")
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids must name at least one token, or be None to allow all.")
            for token_id in self.allowed_token_ids:
                _check_int("a token id in allowed_token_ids", token_id, minimum=0)
        if self.logits_processor is not None and not callable(self.logits_processor):
            raise ValueError("logits_processor must be callable; wrap a list in transformers' LogitsProcessorList.")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def has_processors(self) -> bool:
        """Whether the law at a node depends on more than its logits, temperature and filters."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or bool(self.logit_bias)
            or self.min_new_tokens > 0
            or self.allowed_token_ids is not None
            or self.logits_processor is not None
        )


def _check_number(name: str, value: float, in_range: Callable[[float], bool], wanted: str) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not in_range(value):
        raise ValueError(f"{name} must be {wanted}, got {value!r}.")


def _check_int(name: str, value: int, minimum: int | None) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or (minimum is not None and value < minimum):
        wanted = "an int" if minimum is None else f"an int of at least {minimum}"
        raise ValueError(f"{name} must be {wanted}, got {value!r}.")
