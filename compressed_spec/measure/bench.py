"""One benchmark: transformers, ours plainly, ours with the best chain and the best tree, on one checkpoint.

V = vocabulary
"""

from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from compressed_spec.measure import parts
from compressed_spec.measure.bench_options import BenchOptions
from compressed_spec.measure.bench_report import BenchReport
from compressed_spec.measure.identity import peak_memory
from compressed_spec.measure.pace import Pace, compare_pace
from compressed_spec.measure.prompts import Texts
from compressed_spec.measure.roof import bandwidth, token_bytes
from compressed_spec.measure.sides import OurSide, Side, TransformersSide, transformers_side
from compressed_spec.measure.timing import Summary, ratio, summarize
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.to_transformers import logits_difference
from compressed_spec.tree import TokenTree

NODES = tuple(range(1, 17))
NUM_TRIAL_PROMPTS, TRIAL_TOKENS, TRIAL_REPEATS = 4, 48, 2
BATCH_REPEATS = 3  # prefills of large batches take most of a run
CHECKED_TOKENS = 64
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.05}  # of the largest logit, see `logits_difference`


def run_bench(
    model: DeepseekV4, folder: str | Path, texts: Texts, options: BenchOptions, say: Callable[[str], None]
) -> BenchReport:
    """Measure all of it. say: told of each step before it begins.

    Raises ValueError if there are too few texts, or texts of these lengths do not fit the model, or transformers'
    logits are others than ours: then it runs something else, and no speed is compared.
    """
    _check_sizes(model, texts, options)
    say("choosing a chain and a tree, on other prompts")
    prompts = texts.prompts(0, options.num_prompts, options.context)
    trial = texts.prompts(options.num_prompts, NUM_TRIAL_PROMPTS, options.context)
    chain, tree = (_best(model, options.drafter, names, trial) for names in (options.chains, options.trees))
    peak_alone = peak_memory()
    say("checking logits against transformers")
    peer = transformers_side(model, folder)
    difference = check_logits(model, peer, prompts[0])

    own = {
        "off": OurSide(model=model, tree="off"),
        "chain": OurSide(model=model, tree=chain, drafter=options.drafter),
        "tree": OurSide(model=model, tree=tree, drafter=options.drafter),
    }
    say(f"decoding in turns: transformers, off, {chain}, {tree}")
    paces = compare_pace(
        {"transformers": peer, **own},
        [[prompt] for prompt in prompts],
        max_new_tokens=options.max_new_tokens,
        repeats=options.repeats,
        stop=True,
    )
    batches = {}
    for size in options.batch_sizes:
        say(f"decoding batches of {size}")
        batches[size] = _batch(peer, own, texts, size, options)

    say("timing the parts of a round")
    singles = 5 * options.repeats
    round_parts = parts.round_parts(model, prompts[0], NODES, singles)
    layers = parts.bookkeeping_by_layers(model.state_spec(), model.device, options.context, model.vocab_size, singles)
    say(f"a token at {options.context} and {options.long_context} tokens of context")
    [long_prompt] = texts.prompts(0, 1, options.long_context)
    short, long = parts.token_by_context(model, [prompts[0], long_prompt], singles)
    say("prefill, and the memory's bandwidth")
    prefill = parts.prefill_seconds(model, peer.model, prompts[0], options.repeats)
    reads = token_bytes(model, options.context + options.max_new_tokens // 2)
    peak = peak_memory()  # before the buffer that measures bandwidth
    memory = bandwidth(model.device, options.repeats)

    off = paces["off"].tokens_per_second
    theirs = paces["transformers"].tokens_per_second
    plain_round, eight = round_parts.verify[1], round_parts.verify[8]
    return BenchReport(
        options=options,
        chain=chain,
        tree=tree,
        logits_difference=difference,
        num_differing_texts={name: pace.num_differing(paces["off"]) for name, pace in paces.items() if name != "off"},
        num_texts=options.num_prompts * options.repeats,
        tokens_per_second={name: summarize(pace.tokens_per_second) for name, pace in paces.items()},
        seconds_per_text={name: summarize(pace.seconds_per_text) for name, pace in paces.items()},
        acceptance_length={name: pace.acceptance_length for name, pace in paces.items() if name in own},
        stage_milliseconds={name: paces[name].stage_milliseconds for name in own},
        speedup_off=ratio(off, theirs),
        speedup_chain=speculation_ratio(paces["chain"], theirs, options),
        speedup_tree=speculation_ratio(paces["tree"], theirs, options),
        tree_over_off=speculation_ratio(paces["tree"], off, options),
        batches=batches,
        verify_milliseconds={size: summarize([1e3 * s for s in values]) for size, values in round_parts.verify.items()},
        verify_d8_over_d1=ratio(eight, plain_round),
        plan_ms=summarize([1e3 * s for s in round_parts.plan]),
        commit_ms=summarize([1e3 * s for s in round_parts.commit]),
        bookkeeping_milliseconds={count: summarize([1e3 * s for s in values]) for count, values in layers.items()},
        bookkeeping_by_layers=ratio(layers[max(layers)], layers[min(layers)]),
        context_8k_over_512=ratio(long, short),
        token_milliseconds={
            options.context: summarize([1e3 * s for s in short]),
            options.long_context: summarize([1e3 * s for s in long]),
        },
        prefill_tokens_per_second={
            name: summarize([options.context / s for s in values]) for name, values in prefill.items()
        },
        prefill_speedup=ratio(prefill["transformers"], prefill["ours"]),
        token_bytes=reads,
        bandwidth=memory,
        roof_fraction=summarize([reads.total / memory.median * rate for rate in off]),
        peak_memory_alone=peak_alone,
        peak_memory=peak,
        cache_bytes=_cache_bytes(model, options),
    )


def _check_sizes(model: DeepseekV4, texts: Texts, options: BenchOptions) -> None:
    if len(texts.documents) < options.num_prompts + NUM_TRIAL_PROMPTS:
        raise ValueError(
            f"{options.num_prompts} prompts to measure and {NUM_TRIAL_PROMPTS} others to choose shapes by are more "
            f"than the {len(texts.documents)} there are: lower num_prompts, or give more."
        )
    most = model.max_position_embeddings
    spare = 5 * options.repeats * parts.ACCEPTED + parts.WIDEST.num_nodes
    for name, extra in (("context", max(options.max_new_tokens, spare)), ("long_context", spare)):
        if getattr(options, name) + extra > most:
            raise ValueError(
                f"{name} {getattr(options, name)} and {extra} tokens more go beyond the model's {most} positions: "
                f"lower {name}, max_new_tokens or repeats."
            )


@torch.no_grad()
def check_logits(model: DeepseekV4, peer: TransformersSide, prompt_ids: Sequence[int]) -> float:
    """How far transformers' logits are from ours at the last tokens of a prompt (see `logits_difference`).

    Raises ValueError if that is more than rounding explains, or transformers cannot compute them.
    """
    count = min(CHECKED_TOKENS, len(prompt_ids))
    before, last = prompt_ids[:-count], prompt_ids[-count:]
    cache = model.new_cache(max_length=len(prompt_ids), max_nodes=count)
    if before:
        model.prefill(cache, [before])
    ours_TV = model.verify(cache, [TokenTree.chain(last)]).logits
    ids_BL = torch.tensor([list(prompt_ids)], device=model.device)
    try:
        theirs_TV = peer.model(ids_BL, use_cache=False, logits_to_keep=count).logits[0]
    except RuntimeError as error:  # transformers 5.17 multiplies matrices of two dtypes in bfloat16
        raise ValueError(
            f"transformers {version('transformers')} cannot run this model ({error}): try --dtype float32, or another "
            "version of it."
        ) from error
    difference, tolerance = logits_difference(ours_TV, theirs_TV), TOLERANCES[model.embed.weight.dtype]
    if not difference <= tolerance:  # not a number, too
        raise ValueError(
            f"transformers' logits differ from ours by {difference:.2g} of the largest one, more than rounding does "
            f"({tolerance:g}): the two do not run the same model, so their speeds are not compared."
        )
    return difference


def _best(model: DeepseekV4, drafter: str, names: Sequence[str], trial: Sequence[Sequence[int]]) -> str:
    """The fastest of some shapes; alone it is so without a trial."""
    if len(names) == 1:
        return names[0]
    paces = compare_pace(
        {name: OurSide(model=model, tree=name, drafter=drafter) for name in names},
        [[prompt] for prompt in trial],
        max_new_tokens=TRIAL_TOKENS,
        repeats=TRIAL_REPEATS,
        stop=False,
    )
    return max(names, key=lambda name: summarize(paces[name].tokens_per_second).median)


def _batch(
    peer: TransformersSide, own: dict[str, OurSide], texts: Texts, size: int, options: BenchOptions
) -> dict[str, Summary]:
    """Tokens a second of batches of this size; nobody stops early, so that every row is busy to the end."""
    sides: dict[str, Side] = {"transformers": peer, "off": own["off"], "tree": own["tree"]}
    paces = compare_pace(
        sides,
        [texts.prompts(0, size, options.context)],
        max_new_tokens=min(options.max_new_tokens, TRIAL_TOKENS),
        repeats=min(options.repeats, BATCH_REPEATS),
        stop=False,
    )
    return {name: summarize(pace.tokens_per_second) for name, pace in paces.items()}


def speculation_ratio(pace: Pace, over: Sequence[float], options: BenchOptions) -> Summary | None:
    """None where no draft was accepted, or what was accepted says nothing about trained models."""
    return ratio(pace.tokens_per_second, over) if pace.num_accepted and not options.random_weights else None


def _cache_bytes(model: DeepseekV4, options: BenchOptions) -> int:
    cache = model.new_cache(max_length=options.context + options.max_new_tokens, max_nodes=1, max_draft_nodes=1)
    return cache.nbytes
