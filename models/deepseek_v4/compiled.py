"""A model's forward of few nodes, compiled: some ten programs, one a kind of layer, which models of any depth share.

On a CPU a decoded token is thousands of operations of a microsecond or two; a compiler fuses the elementwise ones.
"""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from compressed_spec.ahead import Inputs, Job, Program, packages_for, source_digest, weights_of
from compressed_spec.cache import Scratch
from compressed_spec.kernels.commit import Moves
from compressed_spec.models.deepseek_v4.attention import Attention
from compressed_spec.models.deepseek_v4.block import Experts
from compressed_spec.models.deepseek_v4.few_forward import FewForward, Limits, Piece
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.modules import Linear
from compressed_spec.models.deepseek_v4.pieces import Layer, RowMoves
from compressed_spec.rows import make_plan
from compressed_spec.target import DraftBlock, DraftStep
from compressed_spec.tree import TokenTree

# Measured on two cores, hidden size 128 and 256: up to here, gathering costs less than grouping and its waits.
MOST_WEIGHTS = 2**27  # of experts that a layer gathers, once for each (node, expert) pair
MOST_KEYS = 2**17
# What pieces are made of.
_SOURCES = ("ahead.py", "kernels", "models/deepseek_v4", "rows.py", "layer_scratch.py", "parallel.py")


def has_compiler() -> bool:
    """Whether there is a C++ compiler that torch can use."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def compile_few(model: DeepseekV4, *, progress: bool = False) -> None:
    """Give the model a compiled forward of few nodes: a minute or two, or a second once its programs are on disk.

    Only for "fast" numerics. From then on the weights must stay where they are.
    """
    _lay_out(model)
    root = Path(__file__).parents[2]
    source = source_digest(*(root / part for part in _SOURCES))
    samples = _samples(model)
    jobs = [
        Job(
            function=function,
            inputs=Inputs(tensors=tensors, open_axes=_open_axes(function, tensors)),
            description=(key[0], key[2], model.config, model.precision.dtype),
            source=source,
        )
        for key, (function, tensors) in samples.items()
    ]
    few = FewForward(model, _limits(model))
    for key, job, package in zip(samples, jobs, packages_for(jobs, progress=progress), strict=True):
        few.pieces[key] = Piece(function=job.function, run=Program(package, weights_of(job.function)).run)
    model.few = few


def _limits(model: DeepseekV4) -> Limits:
    config = model.config
    weights = 3 * config.hidden_size * config.moe_intermediate_size * config.num_experts_per_tok
    return Limits(nodes=MOST_WEIGHTS // weights, keys=MOST_KEYS)


def _open_axes(function: nn.Module, inputs: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], ...]:
    """Rows differ from round to round (the first axis), and the length of some lists (the last)."""
    lists = function.open_lists if isinstance(function, Layer) else frozenset()
    if isinstance(function, RowMoves):
        return ((1,),) * len(inputs)
    return tuple((0, 1) if index in lists else (0,) for index in range(len(inputs)))


def _lay_out(model: DeepseekV4) -> None:
    """Store matrices transposed, so that what is summed over is the slow axis and outputs fill vectors.

    Experts, which are widened while they are summed, also in bfloat16, if that loses nothing, as with weights that were
    stored as FP4: half to be read. Widening others costs more than reading them.
    """
    grouped = {id(module.wo_a) for module in model.modules() if isinstance(module, Attention)}
    for module in model.modules():
        if isinstance(module, Experts | Linear) and id(module) not in grouped:
            for name, weight in list(module.named_parameters()):
                kept = _narrowed(weight) if isinstance(module, Experts) else weight
                turned = kept.transpose(-2, -1).contiguous().transpose(-2, -1)
                setattr(module, name, nn.Parameter(turned, requires_grad=False))


def _narrowed(weight: torch.Tensor) -> torch.Tensor:
    """In bfloat16, if that loses nothing."""
    narrow = weight.to(torch.bfloat16)
    return narrow if torch.equal(narrow.to(weight.dtype), weight) else weight


class _Sampling(FewForward):
    """Keeps what each piece is given first."""

    def __init__(self, model: DeepseekV4) -> None:
        super().__init__(model, Limits(nodes=2**30, keys=2**62))
        self.samples: dict[tuple[str, int, bool], tuple[nn.Module, list[torch.Tensor]]] = {}

    def _add(self, key: tuple[str, int, bool], function: nn.Module) -> None:
        super()._add(key, function)
        plain = self.pieces[key].run

        def run(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            self.samples.setdefault(key, (function, inputs))
            return plain(inputs)

        self.pieces[key].run = run


def _samples(model: DeepseekV4) -> dict[tuple[str, int, bool], tuple[nn.Module, list[torch.Tensor]]]:
    """Every piece with its inputs, in rounds whose nodes all close a window: where indexers choose, and where they need
    not.

    No axis that is left open has length 0 or 1 then, and only those are equal that always are.
    """
    spec = model.state_spec()
    period = math.lcm(*(comp.ratio for comp in spec.compressions))
    near = min((2 * comp.ratio for comp in spec.compressions if comp.index_topk > 1), default=2)
    far = max((comp.ratio * max(2, comp.index_topk + 1) for comp in spec.compressions), default=2)
    far = -(-far // period) * period
    fixed = {spec.sliding_window, *(size for comp in spec.compressions for size in (comp.span, comp.index_topk))}
    count = next(n for n in itertools.count(9) if not {n, n - 1} & fixed)
    while any(far // comp.ratio in {count, count - 1, *fixed} for comp in spec.compressions):
        far += period
    cache = model.new_cache(max_length=far, max_nodes=count)
    few = _Sampling(model)
    for end in (far, near):
        tree = TokenTree(tokens=[0] * count, parents=[-1] + [0] * (count - 1))
        plan = make_plan(spec, cache.shape, [tree], [0], [end - 2], cache.device)
        with torch.no_grad():
            few.logits(few.forward(plan, Scratch(cache)))
    lane_P, still_MN = range(len(cache.pools)), torch.full((len(cache.pools), count), -1)
    # Pools of as many rows here may have different ones elsewhere.
    pools = [
        rows_LRD.new_zeros(len(rows_LRD), 2 * count + i, rows_LRD.shape[2])
        for i, rows_LRD in enumerate(cache.pools.values())
    ]
    few.move_rows(pools, lane_P, Moves(source_MN=still_MN, target_MN=still_MN))
    if model.mtp_head is not None:
        place_N, stream = torch.arange(2), (2, model.config.hc_mult, model.config.hidden_size)
        step = DraftStep(
            streams_NMD=torch.zeros(stream, dtype=model.precision.dtype),
            tokens_N=place_N,
            position_N=place_N,
            window_rows_NW=place_N.unsqueeze(1).repeat(1, model.config.sliding_window),
            first=0,
        )
        with torch.no_grad():
            few.draft_step(step, Scratch(cache))
    if model.dspark_head is not None:
        places_N = torch.arange(count)
        block = DraftBlock(
            roots_B=places_N[:1],
            position_N=places_N,
            rows_NW=places_N.unsqueeze(1).repeat(1, model.config.sliding_window + model.draft_block_size),
        )
        with torch.no_grad():
            few.draft_hidden(places_N, block, Scratch(cache))
    return few.samples
