"""What a round's parts cost: verification by nodes, plan and commit by layers, a token by context, a prefill.

T = nodes, V = vocabulary
"""

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import PreTrainedModel

from compressed_spec.cache import Cache, Verification
from compressed_spec.layout import CacheShape, StateSpec
from compressed_spec.measure.timing import in_turns, seconds
from compressed_spec.rows import make_plan
from compressed_spec.target import TargetModel
from compressed_spec.topology import tree_around
from compressed_spec.tree import TokenTree, TreeShape

WIDEST = TreeShape(num_steps=5, top_k=3, num_nodes=16)  # of the trees whose verification is timed
NODES = 8  # of the tree that is planned and committed
ACCEPTED = 3


def tree_of(num_nodes: int, text: Sequence[int], vocab_size: int) -> TokenTree:
    """A tree of this many nodes, as drafting five steps of three gives it, around a text that begins with its root."""
    if num_nodes == 1:
        return TokenTree(tokens=[text[0]], parents=[-1])
    return tree_around(text[0], list(text[1:]), replace(WIDEST, num_nodes=num_nodes), vocab_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundParts:
    """Seconds of each repeat. verify: by nodes D. plan, commit: of a round of 8 nodes, 3 of them accepted."""

    verify: dict[int, list[float]]
    plan: list[float]
    commit: list[float]


@torch.no_grad()
def round_parts(model: TargetModel, prompt_ids: Sequence[int], sizes: Sequence[int], repeats: int) -> RoundParts:
    """Verify trees of each size in turns after a prompt, then plan, verify and commit one more; `repeats` times.

    Planning and committing are timed beside whole forwards, so that they find the processor's caches as they do in a
    round. The text grows by what is committed, so that windows close in some repeats and not in others.
    """
    cache = model.new_cache(
        max_length=len(prompt_ids) + ACCEPTED * (repeats + 1) + WIDEST.num_steps + 1, max_nodes=max(*sizes, NODES)
    )
    root = int(model.prefill(cache, [prompt_ids])[0].argmax())
    result = RoundParts(verify={size: [] for size in sizes}, plan=[], commit=[])
    for turn in range(repeats + 1):
        text = [root, *prompt_ids[: WIDEST.num_steps]]
        calls = {size: _timed_verify(model, cache, tree_of(size, text, model.vocab_size)) for size in sizes}
        order = sizes if turn % 2 else list(reversed(sizes))
        gc.collect()
        for size in order:  # untimed: garbage collection drives the weights out of the processor's caches
            calls[size]()
        times = {size: calls[size]() for size in order}
        tree, lengths = tree_of(NODES, text, model.vocab_size), list(cache.lengths)
        planned = seconds(partial(make_plan, cache.spec, cache.shape, [tree], [0], lengths, cache.device))
        verify = model.verify(cache, [tree])
        path = tree.path_to(len(tree) - 1)[:ACCEPTED]
        committed = seconds(partial(cache.commit, verify, [path]))
        root = int(verify.logits[path[-1]].argmax())
        if turn:  # the first one warms up
            for size, value in times.items():
                result.verify[size].append(value)
            result.plan.append(planned)
            result.commit.append(committed)
    return result


def _timed_verify(model: TargetModel, cache: Cache, tree: TokenTree) -> Callable[[], float]:
    return lambda: seconds(lambda: model.verify(cache, [tree]))


def bookkeeping_by_layers(
    spec: StateSpec, device: torch.device, context: int, vocab_size: int, repeats: int
) -> dict[int, list[float]]:
    """Seconds of planning and committing a tree of 8 nodes, in turns, by number of layers.

    The state of one layer a kind, of the model's own layers, and of four times as many. Nothing is computed between
    plan and commit, for only the state matters to them.
    """
    small = replace(
        spec,
        num_layers=1 + len(spec.compressions),
        compressions=tuple(replace(comp, num_layers=1) for comp in spec.compressions),
    )
    large = replace(
        spec,
        num_layers=4 * spec.num_layers,
        compressions=tuple(replace(comp, num_layers=4 * comp.num_layers) for comp in spec.compressions),
    )
    calls = {
        str(one.num_layers): _bookkeeping(one, device, context, vocab_size, repeats) for one in (small, spec, large)
    }
    in_turns(calls, 2)
    return {int(name): values for name, values in in_turns(calls, repeats).items()}


def _bookkeeping(
    spec: StateSpec, device: torch.device, context: int, vocab_size: int, repeats: int
) -> Callable[[], float]:
    shape = CacheShape(
        batch_size=1,
        max_length=context + ACCEPTED * (repeats + 2) + WIDEST.num_steps + 1,
        max_nodes=NODES,
        prefill_chunk=context,
        max_draft_nodes=1,
    )
    cache = Cache(spec, shape, device)
    text = [token % vocab_size for token in range(WIDEST.num_steps + 1)]
    tree = tree_of(NODES, text, vocab_size)
    path = tree.path_to(len(tree) - 1)[:ACCEPTED]
    _plan_and_commit(cache, TokenTree.chain([0] * context), range(context))
    return lambda: seconds(lambda: _plan_and_commit(cache, tree, path))


def _plan_and_commit(cache: Cache, tree: TokenTree, path: Sequence[int]) -> None:
    plan = make_plan(cache.spec, cache.shape, [tree], [0], list(cache.lengths), cache.device)
    nothing = torch.empty((len(tree), 0), device=cache.device)
    verify = Verification(trees=(tree,), rows=(0,), logits=nothing, plan=plan, ticket=cache.next_ticket())
    cache.commit(verify, [path])


@torch.no_grad()
def token_by_context(model: TargetModel, prompts_ids: Sequence[Sequence[int]], repeats: int) -> list[list[float]]:
    """Seconds of each plain round (verify, choose, commit) after each of these prompts, taken in turns."""
    rounds = {str(i): _plain_rounds(model, prompt, repeats + 2) for i, prompt in enumerate(prompts_ids)}
    in_turns(rounds, 2)
    return list(in_turns(rounds, repeats).values())


def _plain_rounds(model: TargetModel, prompt_ids: Sequence[int], count: int) -> Callable[[], float]:
    cache = model.new_cache(max_length=len(prompt_ids) + count, max_nodes=1, max_draft_nodes=1)
    newest = [int(model.prefill(cache, [prompt_ids])[0].argmax())]

    def one_round() -> None:
        verify = model.verify(cache, [TokenTree(tokens=newest, parents=[-1])])
        newest[0] = int(verify.logits[0].argmax())
        cache.commit(verify, [[0]])

    return lambda: seconds(one_round)


@torch.no_grad()
def prefill_seconds(
    model: TargetModel, peer: PreTrainedModel, prompt_ids: Sequence[int], repeats: int
) -> dict[str, list[float]]:
    """Seconds of each prefill of one prompt, "ours" and "transformers", up to the logits after its last token.

    transformers fills a cache of its own that it makes on the way; ours is made beforehand and used again.
    """
    cache = model.new_cache(max_length=len(prompt_ids), max_nodes=1, max_draft_nodes=1)
    ids_BL = torch.tensor([list(prompt_ids)], device=model.device)

    def ours() -> None:
        model.prefill(cache, [prompt_ids])

    def theirs() -> None:
        peer(ids_BL, use_cache=True, logits_to_keep=1)

    def call(run: Callable[[], None]) -> Callable[[], float]:
        def timed() -> float:
            cache.release(0)
            return seconds(run)

        return timed

    calls: Mapping[str, Callable[[], float]] = {"ours": call(ours), "transformers": call(theirs)}
    in_turns(calls, 1)
    return in_turns(calls, repeats)
