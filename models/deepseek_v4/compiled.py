"""A model's pieces, compiled: what lies between two writes of rows becomes one call each.

On a CPU a decoded token is thousands of operations of a microsecond or two; torch.compile fuses the elementwise ones.
Whole layers are not compiled: with the writes inside, every number of closing windows would be another program. Layers
of one kind share their programs, and all sizes are left open, so that a tree of another size compiles nothing.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from inspect import signature
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler

from compressed_spec.cache import Scratch
from compressed_spec.models.deepseek_v4.attention import AttentionRound
from compressed_spec.models.deepseek_v4.block import Block, Experts
from compressed_spec.models.deepseek_v4.few import Few
from compressed_spec.models.deepseek_v4.model import DeepseekV4
from compressed_spec.models.deepseek_v4.mtp import MTPHead
from compressed_spec.rows import make_plan
from compressed_spec.target import DraftStep
from compressed_spec.tree import TokenTree

_PIECES: dict[type, tuple[str, ...]] = {
    Block: ("few", "enter", "attend"),
    MTPHead: ("few_step", "kv_rows"),
    DeepseekV4: ("logits", "draft_logits"),
}
_FIXED_LISTS = frozenset({"window_rows_TW", "pool_rows_CS", "window_rows_NW"})
# Measured on two cores, hidden size 128 and 256: up to here, gathering costs less than grouping and its waits.
MOST_WEIGHTS = 2**27  # of experts that a layer gathers, once for each (node, expert) pair
MOST_KEYS = 2**17


class _Program:
    """One method of modules that are built alike, compiled once.

    Guards are left out: they cost more than most pieces do. What they would watch for cannot change here, since modules
    share a program only if they are built alike, and the program itself still asserts its inputs' strides.
    """

    def __init__(self, method: Callable[..., Any]) -> None:
        def call(module: nn.Module, *args: Any) -> Any:
            return method(module, *args)

        # The compiler keeps programs by code object, so that each program needs one of its own.
        call.__code__ = call.__code__.replace()
        # The C++ wrapper: between two fused loops, Python costs more than the loops.
        options: dict[str, Any] = {"guard_filter_fn": _no_guards, "cpp_wrapper": True}
        self._compiled = torch.compile(call, fullgraph=True, options=options)
        self._call = call
        self._direct: Callable[..., Any] | None = None

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        if self._direct is not None:
            return self._direct(module, *args)
        _leave_open(args)
        result = self._compiled(module, *args)
        # From now on what the compiler has made of it, without its dispatch, which is as long as a small layer.
        (entry,) = _debug_get_cache_entry_list(self._call.__code__)
        self._direct = FunctionType(entry.code, self._call.__globals__, closure=self._call.__closure__)
        return result


class _Piece:
    """What stands in a method's place: a program for each set of optional arguments that it is given."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self._programs: dict[object, _Program] = {}

    def __call__(self, module: nn.Module, *args: Any) -> Any:
        last = args[-1]
        chooses = isinstance(last, AttentionRound) and last.chooses
        if chooses not in self._programs:
            self._programs[chooses] = _Program(self._method)
        return self._programs[chooses](module, *args)


def _no_guards(guards: Sequence[Any]) -> list[bool]:
    return [False] * len(guards)


def _leave_open(value: Any, name: str = "") -> None:
    """Mark the sizes that differ from round to round: rows (the first axis), and the length of lists (the last)."""
    if isinstance(value, torch.Tensor):
        listed = value.dim() == 2 and value.dtype is torch.int64 and name not in _FIXED_LISTS
        for axis in (0, 1) if listed else (0,):
            # Every size that is open by itself costs some microseconds a call. Those that are equal in `_warm_up` are
            # always equal. (torch 2.11 cannot say so, and does without.)
            alike = (
                {"shape_id": f"size {value.shape[axis]}"} if "shape_id" in signature(mark_unbacked).parameters else {}
            )
            mark_unbacked(value, axis, **alike)
    elif isinstance(value, tuple):
        for part in value:
            _leave_open(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            _leave_open(part)
    elif is_dataclass(value):
        for field in fields(value):
            _leave_open(getattr(value, field.name), field.name)


def has_compiler() -> bool:
    """Whether there is a C++ compiler that torch can use."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return True


def compile_pieces(model: DeepseekV4) -> None:
    """Compile the pieces of a model in place, and run each once, which takes a minute (seconds from the disk's cache).

    Only for "fast" numerics.
    """
    pieces: dict[object, _Piece] = {}
    for module in model.modules():
        if isinstance(module, Experts):
            _narrow(module)
        tensors = [*module.named_parameters(), *module.named_buffers()]
        built = (type(module), *((name, tensor.shape, tensor.dtype) for name, tensor in tensors))
        for kind, names in _PIECES.items():
            if isinstance(module, kind):
                for name in names:
                    piece = pieces.setdefault((name, built), _Piece(getattr(type(module), name)))
                    setattr(module, name, partial(piece, module))
    _warm_up(model)
    config = model.config
    weights = 3 * config.hidden_size * config.moe_intermediate_size * config.num_experts_per_tok
    model.few = Few(nodes=MOST_WEIGHTS // weights, keys=MOST_KEYS)


def _narrow(experts: Experts) -> None:
    """Keep experts in bfloat16 if that loses nothing, as with weights that were stored as FP4: half to be read."""
    for name, weight in list(experts.named_parameters()):
        narrow = weight.to(torch.bfloat16)
        if weight.dtype is torch.float32 and torch.equal(narrow.to(weight.dtype), weight):
            setattr(experts, name, nn.Parameter(narrow, requires_grad=False))


def _warm_up(model: DeepseekV4) -> None:
    """Run every piece once, in rounds whose nodes all close a window: where indexers choose, and where they need not.

    No axis that is left open has length 0 or 1 then: of such a one, the compiler would take too much for granted. And
    only those are equal that always are.
    """
    spec = model.state_spec()
    period = math.lcm(*(comp.ratio for comp in spec.compressions))
    near = min((2 * comp.ratio for comp in spec.compressions if comp.index_topk > 1), default=2)
    far = max((comp.ratio * max(2, comp.index_topk + 1) for comp in spec.compressions), default=2)
    far = -(-far // period) * period
    fixed = {spec.sliding_window, *(size for comp in spec.compressions for size in (comp.span, comp.index_topk))}
    few = next(n for n in itertools.count(9) if not {n, n - 1} & fixed)
    many = next(n for n in itertools.count(few + 2) if not {n, n - 1} & fixed)
    model.few = Few(nodes=few, keys=MOST_KEYS)
    while any(far // comp.ratio in {few, few - 1, many, many - 1, *fixed} for comp in spec.compressions):
        far += period
    cache = model.new_cache(max_length=far, max_nodes=many)
    for end, count in ((far, many), (far, few), (near, few)):
        tree = TokenTree(tokens=[0] * count, parents=[-1] + [0] * (count - 1))
        plan = make_plan(spec, cache.shape, [tree], [0], [end - 2], cache.device)
        with torch.no_grad():
            model.logits(model(plan, Scratch(cache)))
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
            model.draft_logits(model.draft_step(step, Scratch(cache)))
