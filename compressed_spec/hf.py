"""Tree speculation inside transformers: `model.generate(..., custom_generate=tree_generate, tree="s3_k2_d6")`.

B = batch rows, L = tokens of a row (left padding included), V = vocabulary
"""

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationMixin, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import (
    BaseStreamer,
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    GenerationConfig,
    GenerationMode,
    MaxLengthCriteria,
)

from compressed_spec.decode import Decoder
from compressed_spec.drafting import Drafter
from compressed_spec.generate import make_decoder, make_requests, stream
from compressed_spec.hf_processors import row_processor, sampling_options
from compressed_spec.models.deepseek_v4.from_transformers import share_parameters
from compressed_spec.stopping import criteria_check

_REFUSED_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
_CACHES = ("cache", "past_key_values")  # its name in transformers 5.24, and in 5.17
_HARMLESS = ("use_cache", "logits_to_keep")  # change how transformers computes, not what


def tree_generate(
    model: PreTrainedModel,
    input_ids: torch.Tensor,
    *,
    generation_config: GenerationConfig,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    synced_gpus: bool = False,
    streamer: BaseStreamer | None = None,
    tree: str = "s3_k2_d6",
    drafter: str | Drafter = "auto",
    verifier: str = "auto",
    seed: int | Sequence[int] | None = None,
    batch_size: int | None = None,
    **model_kwargs: Any,
) -> GenerateDecoderOnlyOutput | torch.Tensor:
    """Decode a `DeepseekV4ForCausalLM` with tree speculation, over its own weights: give it as `custom_generate`.

    All before `tree` comes from transformers' `generate`, with its meaning; the rest are options of `generate` here,
    which that one passes on. drafter: "auto" is n-gram, for transformers loads no draft head. seed: one a row, or an
    int from which each row derives its own; by default drawn from torch's generator, so that `torch.manual_seed`
    decides. batch_size: rows decoded together, all by default.

    Returns the ids `[B, L + new]` as transformers does: prompt, new tokens, pad_token_id up to the longest row; as
    `GenerateDecoderOnlyOutput` if `return_dict_in_generate`. Unlike there

    * a left-padded row gets the text that it gets alone: pads are no tokens here, while transformers compresses them
      like others. Processors and criteria do see them, so that lengths count as usual;
    * sampling follows the same law with noise of its own: a seed gives the text of `tree="off"`, not transformers';
    * processors and criteria are called with one row at a time, and a processor once a tree node with that node's own
      path, so they must keep no state (those of transformers that do are refused);
    * criteria end their own row, and get no scores.

    `stop_strings` need `stopping_criteria=[StopStringCriteria(tokenizer, ...)]`, because transformers keeps the
    tokenizer from custom callables.

    Raises ValueError for what cannot be decoded exactly: beams, scores and other outputs, a cache of the caller's,
    positions of the caller's, padding elsewhere than on the left, a streamer for several rows, unknown options.
    """
    streamer = streamer if streamer is not None else _streamer_of_generate()
    padding_B = _padding(input_ids, model_kwargs.pop("attention_mask", None))
    _refuse(generation_config, model_kwargs, padding_B, synced_gpus)
    if streamer is not None and len(input_ids) > 1:
        raise ValueError("A streamer takes one row, for rows grow by different lengths: generate them one by one.")
    target = share_parameters(model)
    criteria = stopping_criteria if stopping_criteria is not None else StoppingCriteriaList()
    max_length = min([c.max_length for c in criteria if type(c) is MaxLengthCriteria] or [generation_config.max_length])
    eos = frozenset(token for c in criteria if type(c) is EosTokenCriteria for token in c.eos_token_id.tolist())
    others = StoppingCriteriaList(c for c in criteria if type(c) not in (MaxLengthCriteria, EosTokenCriteria))
    pad = _pad_token_id(generation_config)
    if pad is None and len(input_ids) > 1 and (eos or others):
        raise ValueError("Rows may end at different lengths: give pad_token_id, which fills the shorter ones.")

    do_sample = bool(generation_config.do_sample)
    if seed is None:
        seed = int(torch.randint(2**62, ())) if do_sample else 0
    options = sampling_options(logits_processor or (), do_sample=do_sample)
    ids_BL = input_ids.tolist()
    requests = make_requests(
        target,
        [ids[padding:] for ids, padding in zip(ids_BL, padding_B, strict=True)],
        options.params,
        max_new_tokens=max_length - input_ids.shape[1],
        seed=seed,
        stop_token_ids=sorted(eos),
        stop_checks=[criteria_check(others, ids, target.device) for ids in ids_BL] if others else None,
    )
    for row, request in enumerate(requests):
        processor = row_processor(options.processors, row, ids_BL[row], padding_B[row])
        requests[row] = replace(request, params=replace(request.params, logits_processor=processor))
    decoder = make_decoder(
        target,
        requests,
        tree=tree,
        drafter=drafter,
        verifier=verifier,
        batch_size=len(requests) if batch_size is None else batch_size,
    )
    sequences = _assemble(input_ids, _collect(decoder, len(requests), streamer), pad)
    return GenerateDecoderOnlyOutput(sequences=sequences) if generation_config.return_dict_in_generate else sequences


def _refuse(
    config: GenerationConfig, model_kwargs: dict[str, Any], padding_B: Sequence[int], synced_gpus: bool
) -> None:
    """Raise ValueError for whatever this decoder would otherwise have to ignore."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(
            f"{mode.value} cannot be combined with tree speculation, which follows one text a row: "
            "use num_beams=1 and no other decoding mode."
        )
    outputs = [name for name in _REFUSED_OUTPUTS if getattr(config, name, None)]
    if config.return_dict_in_generate and outputs:
        raise ValueError(f"{outputs[0]} is not returned by tree speculation: leave it out.")
    if synced_gpus:
        raise ValueError("synced_gpus is not supported: the weights must be whole on one device.")
    for name in _CACHES:
        cache = model_kwargs.pop(name, None)
        if getattr(cache, "_is_user_defined", False):
            raise ValueError(f"{name} cannot be used: transformers' caches hold no branches, leave it out.")
    positions = model_kwargs.pop("position_ids", None)
    if positions is not None:
        for row, padding in enumerate(padding_B):
            own = positions[row if len(positions) > 1 else 0, padding:].tolist()
            if own != list(range(len(own))):
                raise ValueError("position_ids must count each row's tokens from 0: leave them out.")
    for name, value in model_kwargs.items():
        if name not in _HARMLESS and value is not None and value is not False:
            raise ValueError(f"{name} is no option of tree_generate: leave it out.")


def _padding(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[int]:
    """How many pads each row begins with. Raises ValueError for a mask that is anything but left padding."""
    if attention_mask is None:
        return [0] * len(input_ids)
    mask_BL = attention_mask.to(torch.int64)
    rises = mask_BL.shape == input_ids.shape and bool((mask_BL.diff(dim=1) >= 0).all() and (mask_BL[:, -1] == 1).all())
    if not rises or int(mask_BL.min()) < 0:
        raise ValueError("attention_mask must be 0 for padding on the left, then 1: set the tokenizer's padding_side.")
    padding: list[int] = (mask_BL == 0).sum(dim=1).tolist()
    return padding


def _pad_token_id(config: GenerationConfig) -> int | None:
    """The pad id; `generate` puts an EOS in its place where the config has none."""
    prepared = getattr(config, "_pad_token_tensor", None)
    return config.pad_token_id if prepared is None else int(prepared)


def _streamer_of_generate() -> BaseStreamer | None:
    """The streamer that the calling `generate` was given.

    transformers (5.17 to 5.24) tells it the prompt and then keeps it from custom callables. Left at that, whoever reads
    the streamer would wait for ever.
    """
    own = inspect.currentframe()
    caller = own.f_back.f_back if own is not None and own.f_back is not None else None
    if caller is None or caller.f_code is not inspect.unwrap(GenerationMixin.generate).__code__:
        return None
    streamer: BaseStreamer | None = caller.f_locals["streamer"]
    return streamer


def _collect(decoder: Decoder, num_rows: int, streamer: BaseStreamer | None) -> list[list[int]]:
    """The new tokens of each row; a streamer hears those of each round, and the end."""
    token_ids: list[list[int]] = [[] for _ in range(num_rows)]
    for chunk in stream(decoder):
        token_ids[chunk.request] += chunk.token_ids
        if streamer is not None:
            streamer.put(torch.tensor(chunk.token_ids))
    if streamer is not None:
        streamer.end()
    return token_ids


def _assemble(input_ids_BL: torch.Tensor, new_ids: Sequence[Sequence[int]], pad: int | None) -> torch.Tensor:
    longest = max(map(len, new_ids))
    rows = [[*ids, *[pad or 0] * (longest - len(ids))] for ids in new_ids]
    return torch.cat((input_ids_BL, input_ids_BL.new_tensor(rows)), dim=1)
