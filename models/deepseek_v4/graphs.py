"""Rounds as CUDA graphs: one for each form of tree, number of trees and length, filled up to the next of a few sizes.

B = trees of a bucket, T = nodes of all trees
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

import torch

from compressed_spec.device_trees import DeviceDraft, DeviceTrees, RoundInputs, RoundOutputs
from compressed_spec.kernels.triton_device import launching_on
from compressed_spec.models.deepseek_v4.device_round import DeviceRound

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
SHORTEST = 1024  # tokens: the smallest bucket of lengths, which double from there
_WARM_UPS = 2  # before a capture, for compilers and libraries to make what they need


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphKey:
    """What a graph is made for. form: the one list of parents that all trees have, or the key of what drafts them."""

    form: tuple[int, ...]
    drafted: bool
    num_trees: int
    most_length: int


class CudaCapture:
    """Records bodies without host syncs as CUDA graphs, which share their memory but for their outputs.

    What a body does must not matter, because it also warms up.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, body: Callable[[], None]) -> Replay:
        """A graph of the body."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                body()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            body()
        return graph.replay


def eager(body: Callable[[], None]) -> Replay:
    """No graph: every replay runs the body. For devices without graphs."""
    return body


@dataclass(slots=True, kw_only=True)
class _Recorded:
    """A graph's own inputs and outputs."""

    inputs: RoundInputs
    outputs: RoundOutputs | None
    replay: Replay


class GraphedRounds:
    """Runs rounds of trees of one form; makes a graph when a key is first met.

    capture: a `CudaCapture` on a GPU.
    """

    def __init__(self, device_round: DeviceRound, capture: Capture) -> None:
        self._round, self._capture = device_round, capture
        self._recorded: dict[GraphKey, _Recorded] = {}

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """Of the graphs made so far."""
        return tuple(self._recorded)

    def follow(self, lengths: Sequence[int]) -> None:
        """See `DeviceRounds`."""
        lengths_B = torch.tensor(lengths, dtype=torch.int64)
        self._round.lengths_B.copy_(lengths_B, non_blocking=True)

    def __call__(self, form: Sequence[int] | DeviceDraft, inputs: RoundInputs, most_length: int) -> RoundOutputs:
        """See `DeviceRounds`."""
        with launching_on(self._round.device):
            return self._run(form, inputs, most_length)

    def _run(self, form: Sequence[int] | DeviceDraft, inputs: RoundInputs, most_length: int) -> RoundOutputs:
        num_trees, shape = len(inputs.rows_B), self._round.cache.shape
        given = isinstance(form, Sequence)
        size = len(form) if isinstance(form, Sequence) else form.num_nodes
        most = shape.batch_size if isinstance(form, Sequence) else form.most_trees
        # Filled up no further than there is room: rows of the cache, slots for nodes, and those of a draft head.
        room = min(shape.batch_size, shape.num_slots // size, most)
        key = GraphKey(
            form=tuple(form) if isinstance(form, Sequence) else form.key,
            drafted=not given,
            num_trees=max(num_trees, min(batch_bucket(num_trees), room)),
            most_length=length_bucket(most_length),
        )
        recorded = self._recorded.get(key)
        if recorded is None:
            recorded = self._recorded[key] = self._record(key, form)
        for field in fields(RoundInputs):
            target, given = getattr(recorded.inputs, field.name), getattr(inputs, field.name)
            target[: len(given)].copy_(given, non_blocking=True)
        recorded.inputs.rows_B[num_trees:] = -1
        recorded.replay()
        outputs = recorded.outputs
        assert outputs is not None
        return RoundOutputs(
            path_BA=outputs.path_BA[:num_trees],
            token_BA=outputs.token_BA[:num_trees],
            count_B=outputs.count_B[:num_trees],
            next_token_B=outputs.next_token_B[:num_trees],
            logits_TV=outputs.logits_TV[: num_trees * size],
        )

    def _record(self, key: GraphKey, form: Sequence[int] | DeviceDraft) -> _Recorded:
        device, given = self._round.device, None
        if isinstance(form, Sequence):
            given = DeviceTrees.of([form] * key.num_trees, self._round.spec, device)
        num_nodes = key.num_trees * (len(form) if isinstance(form, Sequence) else form.num_nodes)
        inputs = RoundInputs(
            # No tree is anybody's while the graph is made, so that nothing is committed.
            rows_B=torch.full((key.num_trees,), -1, dtype=torch.int64, device=device),
            tokens_T=torch.zeros(num_nodes, dtype=torch.int64, device=device),
            temperature_T=torch.zeros(num_nodes, dtype=torch.float64, device=device),
            seeds_T=torch.zeros(num_nodes, dtype=torch.int64, device=device),
        )
        recorded = _Recorded(inputs=inputs, outputs=None, replay=lambda: None)

        def body() -> None:
            trees, tokens_T = given, inputs.tokens_T
            if not isinstance(form, Sequence):
                drafted = form(inputs, self._round.lengths_B)
                trees, tokens_T = drafted.trees, drafted.tokens_T
            assert trees is not None
            recorded.outputs = self._round(trees, replace(inputs, tokens_T=tokens_T), key.most_length)

        recorded.replay = self._capture(body)
        return recorded


def batch_bucket(num_trees: int) -> int:
    """The least bucket that holds so many trees. Raises ValueError beyond the largest."""
    for size in BATCH_BUCKETS:
        if num_trees <= size:
            return size
    raise ValueError(f"A round takes at most {BATCH_BUCKETS[-1]} trees, got {num_trees}: split the batch.")


def length_bucket(length: int) -> int:
    """The least bucket of lengths that holds this one."""
    bucket = SHORTEST
    while bucket < length:
        bucket *= 2
    return bucket
