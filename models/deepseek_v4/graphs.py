"""Rounds as CUDA graphs: one for each form of tree, number of trees and length, filled up to the next of a few sizes.

B = trees of a bucket, T = nodes of all trees
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch

from compressed_spec.models.deepseek_v4.device_plan import DeviceTrees
from compressed_spec.models.deepseek_v4.device_round import DeviceRound, RoundInputs, RoundOutputs

Replay = Callable[[], None]
Capture = Callable[[Callable[[], None]], Replay]
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64)
SHORTEST = 1024  # tokens: the smallest bucket of lengths, which double from there
_WARM_UPS = 2  # before a capture, for compilers and libraries to make what they need


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphKey:
    """What a graph is made for. parents: the one form that all trees have."""

    parents: tuple[int, ...]
    num_trees: int
    most_length: int


def cuda_capture(body: Callable[[], None]) -> Replay:
    """Record a body without host syncs as a CUDA graph; what it does must not matter, because it also warms up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            body()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
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

    capture: `cuda_capture` on a GPU.
    """

    def __init__(self, device_round: DeviceRound, capture: Capture) -> None:
        self._round, self._capture = device_round, capture
        self._recorded: dict[GraphKey, _Recorded] = {}

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        """Of the graphs made so far."""
        return tuple(self._recorded)

    def __call__(self, parents: Sequence[int], inputs: RoundInputs, most_length: int) -> RoundOutputs:
        """As `DeviceRound`, for trees of the form `parents` all. The outputs are overwritten by the key's next round.

        Raises ValueError for more trees than the largest bucket.
        """
        num_trees = len(inputs.rows_B)
        key = GraphKey(
            parents=tuple(parents), num_trees=batch_bucket(num_trees), most_length=length_bucket(most_length)
        )
        recorded = self._recorded.get(key)
        if recorded is None:
            recorded = self._recorded[key] = self._record(key)
        for field in fields(RoundInputs):
            target, given = getattr(recorded.inputs, field.name), getattr(inputs, field.name)
            target[: len(given)].copy_(given)
        recorded.inputs.rows_B[num_trees:] = -1
        recorded.replay()
        outputs = recorded.outputs
        assert outputs is not None
        return RoundOutputs(
            path_BA=outputs.path_BA[:num_trees],
            count_B=outputs.count_B[:num_trees],
            next_token_B=outputs.next_token_B[:num_trees],
            logits_TV=outputs.logits_TV[: num_trees * len(parents)],
        )

    def _record(self, key: GraphKey) -> _Recorded:
        device = self._round.device
        trees = DeviceTrees.of([key.parents] * key.num_trees, self._round.spec, device)
        num_nodes = len(trees.parents_T)
        inputs = RoundInputs(
            # No tree is anybody's while the graph is made, so that nothing is committed.
            rows_B=torch.full((key.num_trees,), -1, dtype=torch.int64, device=device),
            tokens_T=torch.zeros(num_nodes, dtype=torch.int64, device=device),
            temperature_T=torch.zeros(num_nodes, dtype=torch.float64, device=device),
            seeds_T=torch.zeros(num_nodes, dtype=torch.int64, device=device),
        )
        recorded = _Recorded(inputs=inputs, outputs=None, replay=lambda: None)

        def body() -> None:
            recorded.outputs = self._round(trees, inputs, key.most_length)

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
