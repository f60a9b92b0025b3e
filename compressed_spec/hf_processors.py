"""Logits processors that others wrote, transformers' above all, as one request of ours can use them.

L = tokens of a row (left padding included), V = vocabulary
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as theirs

from compressed_spec.sampling_params import LogitsProcessor, SamplingParams

# Functions of a row's ids and scores alone. What is missing here keeps state, runs the model, or wants a whole batch.
_STATELESS = (
    theirs.MinLengthLogitsProcessor,
    theirs.MinNewTokensLengthLogitsProcessor,
    theirs.TemperatureLogitsWarper,
    theirs.RepetitionPenaltyLogitsProcessor,
    theirs.TopPLogitsWarper,
    theirs.TopKLogitsWarper,
    theirs.TopHLogitsWarper,
    theirs.MinPLogitsWarper,
    theirs.TypicalLogitsWarper,
    theirs.EpsilonLogitsWarper,
    theirs.EtaLogitsWarper,
    theirs.NoRepeatNGramLogitsProcessor,
    theirs.SequenceBiasLogitsProcessor,
    theirs.NoBadWordsLogitsProcessor,
    theirs.PrefixConstrainedLogitsProcessor,
    theirs.ForcedBOSTokenLogitsProcessor,
    theirs.ForcedEOSTokenLogitsProcessor,
    theirs.InfNanRemoveLogitsProcessor,
    theirs.ExponentialDecayLengthPenalty,
    theirs.LogitNormalization,
    theirs.SuppressTokensAtBeginLogitsProcessor,
    theirs.SuppressTokensLogitsProcessor,
    theirs.WatermarkLogitsProcessor,
)
# In the order in which both transformers and our sampler apply them.
_WARPERS = {
    theirs.TemperatureLogitsWarper: "temperature",
    theirs.TopKLogitsWarper: "top_k",
    theirs.TopPLogitsWarper: "top_p",
    theirs.MinPLogitsWarper: "min_p",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions:
    """A transformers processor list as options of our sampler, and what is left of it as processors."""

    params: SamplingParams
    processors: tuple[Any, ...]


def check_processors(processors: Iterable[Any]) -> None:
    """Raise ValueError for a processor of transformers that is no function of one row's ids and scores."""
    for processor in processors:
        if type(processor).__module__ == theirs.__name__ and type(processor) not in _STATELESS:
            raise ValueError(
                f"{type(processor).__name__} needs more than one row's ids and scores, "
                "so it cannot judge the nodes of a tree: leave it out."
            )


def bind_processor(processor: Any, prompt_ids: Sequence[int]) -> Any:
    """The processor for texts that follow this prompt: itself, unless it (or a part of a list) has `for_prompt`."""
    if isinstance(processor, list):
        return type(processor)(bind_processor(part, prompt_ids) for part in processor)
    return processor.for_prompt(prompt_ids) if hasattr(processor, "for_prompt") else processor


def sampling_options(processors: Iterable[Any], *, do_sample: bool) -> SamplingOptions:
    """Take the usual warpers off the end of a list that `generate` has built; the law stays the same.

    Raises ValueError for a processor of transformers that is no function of one row's ids and scores.
    """
    rest = list(processors)
    check_processors(rest)
    if not do_sample:
        return SamplingOptions(params=SamplingParams(), processors=tuple(rest))
    options: dict[str, Any] = {"temperature": 1.0}
    names = list(_WARPERS.values())
    while rest and _WARPERS.get(type(rest[-1])) in names and _keeps_one(rest[-1]):
        warper = rest.pop()
        name = _WARPERS[type(warper)]
        options[name] = getattr(warper, name)
        del names[names.index(name) :]
    return SamplingOptions(params=SamplingParams(**options), processors=tuple(rest))


def _keeps_one(warper: Any) -> bool:
    return getattr(warper, "min_tokens_to_keep", 1) == 1 and getattr(warper, "filter_value", -torch.inf) == -torch.inf


def row_processor(processors: Sequence[Any], row: int, ids_L: Sequence[int], padding: int) -> LogitsProcessor | None:
    """The processors for one row of the batch, whose prompt `ids_L` begins with `padding` pads. None without any.

    The pads, which the engine does not know of, are put back before the ids, so that lengths are what they are there.
    """
    if not processors:
        return None
    own: LogitsProcessor = LogitsProcessorList(
        [bind_processor(_of_row(processor, row), ids_L) for processor in processors]
    )
    if not padding:
        return own
    pads_1P = torch.tensor([list(ids_L[:padding])], dtype=torch.int64)

    def padded(ids_1L: torch.Tensor, scores_1V: torch.Tensor) -> torch.Tensor:
        return own(torch.cat((pads_1P.to(ids_1L.device), ids_1L), dim=1), scores_1V)

    return padded


def _of_row(processor: Any, row: int) -> Any:
    """A processor as it treats row `row` of the batch, taking that row alone."""
    if type(processor) is theirs.RepetitionPenaltyLogitsProcessor:
        lengths = getattr(processor, "prompt_ignore_length", None)
        if isinstance(lengths, torch.Tensor):
            return type(processor)(processor.penalty, prompt_ignore_length=int(lengths[row]))
    if type(processor) is theirs.PrefixConstrainedLogitsProcessor:
        prompt = row // processor._num_beams
        allowed: Callable[[int, torch.Tensor], list[int]] = processor._prefix_allowed_tokens_fn
        return type(processor)(lambda _, ids: allowed(prompt, ids), num_beams=1)
    return processor
