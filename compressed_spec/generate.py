"""Prompts in, texts out: the public way to decode."""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from compressed_spec.accepting import Logprobs
from compressed_spec.decode import Chunk, Decoder, Request, StopCheck, check_request
from compressed_spec.drafting import Drafter, make_drafter
from compressed_spec.drafting.fit import num_target_nodes, takes_chains_only
from compressed_spec.hf_processors import bind_processor, check_processors
from compressed_spec.noise import request_seed
from compressed_spec.sampling_params import LogitsProcessor, SamplingParams
from compressed_spec.shaping import AgreedShaper, AutoShaper, AutoTree, FixedShaper, Shaper, parse_shape, profile_costs
from compressed_spec.stats import RequestStats
from compressed_spec.stopping import StoppingCriteria, criteria_check
from compressed_spec.target import TargetModel
from compressed_spec.tree import TreeShape
from compressed_spec.verifying import Verifier, make_verifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Tokens of one request, in OpenAI's words; drafted tokens that were not accepted count nowhere."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """One prompt's new tokens (a stop token included), why they end ("stop" or "length"), and what it took.

    logprobs: one a token, if asked for.
    """

    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: str
    usage: Usage
    stats: RequestStats


def generate(
    model: TargetModel,
    prompts_ids: Sequence[Sequence[int]],
    *,
    tree: str | Shaper = "s3_k2_d6",
    drafter: str | Drafter = "auto",
    max_new_tokens: int = 64,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    min_new_tokens: int = 0,
    logits_processor: LogitsProcessor | None = None,
    seed: int | Sequence[int] = 0,
    stop_token_ids: Sequence[int] | None = None,
    stopping_criteria: StoppingCriteria | None = None,
    verifier: str = "auto",
    logprobs: str | None = None,
    batch_size: int = 8,
) -> list[GenerationResult]:
    """Continue prompts with tree speculation; the text does not depend on `tree`, `drafter` or the company.

    tree: "off", sN_kK_dD, "auto", another name that `parse_shape` lists, or an object. drafter: "auto" (the
    checkpoint's head, else n-gram), "mtp", "dspark", "early-exit", "ngram", "suffix", the import path of a class of
    your own, or an object. temperature 0 is greedy; above it, and for the other sampling options, see SamplingParams.
    seed: one a request, or an int from which request i derives its own. stop_token_ids: None for the checkpoint's EOS,
    [] for none. stopping_criteria: transformers' (see `criteria_check`). verifier: "auto" (greedy, or coupled noise
    above temperature 0) or a name that `make_verifier` knows. logprobs: "raw" for each token's log probability under
    the model's logits, "filtered" under the law that it was drawn from. batch_size: rows decoded together; further
    prompts wait.

    Raises ValueError for an option, prompt or combination that cannot be decoded exactly.
    """
    prompts = _prompts(prompts_ids)
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=logit_bias,
        min_new_tokens=min_new_tokens,
        logits_processor=logits_processor,
    )
    requests = make_requests(
        model,
        prompts,
        params,
        max_new_tokens=max_new_tokens,
        seed=seed,
        stop_token_ids=stop_token_ids,
        stop_checks=None
        if stopping_criteria is None
        else [criteria_check(stopping_criteria, prompt, model.device) for prompt in prompts],
        logprobs=logprobs,
    )
    if not requests:
        return []
    decoder = make_decoder(
        model, requests, tree=tree, drafter=drafter, verifier=verifier, batch_size=min(batch_size, len(requests))
    )
    return collect(decoder, len(requests))


def make_requests(
    model: TargetModel,
    prompts_ids: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    max_new_tokens: int,
    seed: int | Sequence[int] = 0,
    stop_token_ids: Sequence[int] | None = None,
    stop_checks: Sequence[StopCheck] | None = None,
    logprobs: str | None = None,
) -> list[Request]:
    """One request a prompt, with the same options and each its own seed (see `generate`).

    Raises ValueError for prompts that are no token ids, stop ids out of range, seeds that are not one a prompt, or a
    processor of transformers that keeps state.
    """
    prompts = _prompts(prompts_ids)
    stops = frozenset(model.eos_token_ids if stop_token_ids is None else _token_ids("stop_token_ids", stop_token_ids))
    model.check_tokens(sorted(stops))
    try:
        kind = None if logprobs is None else Logprobs(logprobs)
    except ValueError:
        raise ValueError(f"Unknown logprobs {logprobs!r}: use 'raw', 'filtered' or None.") from None
    if not isinstance(seed, int | Sequence):
        raise ValueError(f"seed must be an int, or a list of one int a prompt, got {seed!r}.")
    processor = params.logits_processor
    check_processors(processor if isinstance(processor, list) else [processor])
    seeds = [request_seed(seed, i) for i in range(len(prompts))] if isinstance(seed, int) else list(seed)
    if len(seeds) != len(prompts):
        raise ValueError(f"Give one seed a prompt, or an int: got {len(seeds)} seeds for {len(prompts)} prompts.")
    return [
        Request(
            prompt_ids=prompt,
            params=replace(params, seed=own_seed, logits_processor=bind_processor(processor, prompt)),
            max_new_tokens=max_new_tokens,
            stop_token_ids=stops,
            stop_check=None if stop_checks is None else stop_checks[i],
            logprobs=kind,
        )
        for i, (prompt, own_seed) in enumerate(zip(prompts, seeds, strict=True))
    ]


def _prompts(prompts_ids: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    return [_token_ids(f"Prompt {i}", prompt) for i, prompt in enumerate(prompts_ids)]


def _token_ids(name: str, ids: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, ids))
    except TypeError:
        raise ValueError(f"{name} must be a list of token ids, got {str(ids)[:60]!r}: tokenize text first.") from None


def make_decoder(
    model: TargetModel,
    requests: Sequence[Request],
    *,
    tree: str | Shaper,
    drafter: str | Drafter,
    verifier: str,
    batch_size: int,
) -> Decoder:
    """A decoder with these requests queued, and a cache of `batch_size` rows in which each of them fits.

    Raises ValueError as `generate` does.
    """
    decoder = prepare_decoder(model, requests, tree=tree, drafter=drafter, verifier=verifier, batch_size=batch_size)
    for request in requests:
        decoder.submit(request)
    return decoder


def prepare_decoder(
    model: TargetModel,
    requests: Sequence[Request],
    *,
    tree: str | Shaper,
    drafter: str | Drafter,
    verifier: str,
    batch_size: int,
) -> Decoder:
    """A decoder for these requests, to be submitted as they arrive. Raises ValueError as `generate` does."""
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}.")
    shape = parse_shape(tree) if isinstance(tree, str) else tree
    rule = make_verifier("coupled" if verifier == "auto" else verifier)
    helper = make_drafter(drafter, model)
    for request in requests:
        check_request(model, request)
    max_length = max(len(request.prompt_ids) + request.max_new_tokens - 1 for request in requests)
    if isinstance(shape, AutoTree):
        shape = _auto_shaper(model, drafter, rule, shape.caps, batch_size, max_length)
    if shape is not None and model.group.size > 1 and not isinstance(shape, FixedShaper):
        shape = AgreedShaper(shape, model.group)
    largest = None if shape is None else shape.largest
    cache = model.new_cache(
        batch_size=batch_size,
        max_length=max_length,
        max_nodes=batch_size * num_target_nodes(helper, largest),
        max_draft_nodes=batch_size * (1 if largest is None else max(largest.num_draft_nodes, model.draft_block_size)),
    )
    return Decoder(model, cache, drafter=helper, shape=shape, verifier=rule)


def _auto_shaper(
    model: TargetModel, drafter: str | Drafter, rule: Verifier, caps: TreeShape, batch_size: int, max_length: int
) -> AutoShaper:
    # A drafter for the profile alone: it is started on made-up texts, which one that serves requests must not remember.
    probe = make_drafter(drafter, model) if isinstance(drafter, str) else None
    costs = profile_costs(model, probe, batch_size=batch_size, max_length=max_length, shape=caps)
    return AutoShaper(costs, caps=caps, chains_only=takes_chains_only(rule))


def stream(decoder: Decoder) -> Iterator[Chunk]:
    """Chunks as rounds end, until every request has finished. Rows are released however the consumer leaves."""
    try:
        while decoder.has_work:
            yield from decoder.step()
    finally:
        decoder.close()


def collect(decoder: Decoder, num_requests: int) -> list[GenerationResult]:
    """The results of requests 0 .. num_requests - 1, once all have finished."""
    chunks: list[list[Chunk]] = [[] for _ in range(num_requests)]
    for chunk in stream(decoder):
        chunks[chunk.request].append(chunk)
    times = decoder.clock.times()
    return [
        GenerationResult(
            token_ids=[token for chunk in mine for token in chunk.token_ids],
            logprobs=None if mine[0].logprobs is None else [p for chunk in mine for p in chunk.logprobs or ()],
            finish_reason=mine[-1].finish_reason or "",
            usage=Usage(
                prompt_tokens=decoder.num_prompt_tokens[number],
                completion_tokens=sum(len(chunk.token_ids) for chunk in mine),
            ),
            stats=decoder.stats[number].build(times),
        )
        for number, mine in enumerate(chunks)
    ]
