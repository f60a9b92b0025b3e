"""What each process of a run needs of its device's memory, worked out without weights.

Inputs of a forward and its intermediate results are not counted: a few hundred MiB at the sizes of V4.
"""

from dataclasses import dataclass

import torch

from compressed_spec.layout import CacheShape
from compressed_spec.memory import human_bytes
from compressed_spec.models.deepseek_v4.checkpoint import Checkpoint
from compressed_spec.models.deepseek_v4.load import empty_model
from compressed_spec.models.deepseek_v4.parallel_plan import check_size, possible_sizes
from compressed_spec.models.deepseek_v4.slices import own_bytes
from compressed_spec.models.deepseek_v4.weight_plan import WeightPlan
from compressed_spec.parallel import ParallelGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Bytes of the process that needs most, of `num_processes`.

    stored_bytes: what it reads of the checkpoint. weight_bytes: what that takes once decoded to `dtype`. cache_bytes,
    scratch_bytes: committed rows of all sequences and rows of one round's nodes; both are reserved in full at the
    start, and every process keeps all of them. possible: numbers of processes that can share the model.
    """

    num_processes: int
    dtype: str
    stored_bytes: int
    weight_bytes: int
    cache_bytes: int
    scratch_bytes: int
    possible: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.cache_bytes + self.scratch_bytes

    def problem(self, memory_bytes: int) -> str | None:
        """A sentence if that is more than a device has."""
        if self.total_bytes <= memory_bytes:
            return None
        more = [size for size in self.possible if size > self.num_processes]
        remedies = [f"{more[0]} processes"] if more else []
        remedies += ["a narrower dtype"] if self.dtype in ("float32", "float64") else []
        return (
            f"each of {self.num_processes} processes needs {human_bytes(self.total_bytes)} but a device has "
            f"{human_bytes(memory_bytes)}: use {', '.join([*remedies, 'fewer sequences'])} or shorter ones"
        )


def process_needs(
    checkpoint: Checkpoint, plan: WeightPlan, shape: CacheShape, *, num_processes: int, dtype: torch.dtype
) -> Needs:
    """What a run of so many processes needs. Raises ValueError if they cannot share the model evenly."""
    check_size(checkpoint.config, num_processes)
    groups = [ParallelGroup(rank=rank, size=num_processes) for rank in range(num_processes)]
    model = empty_model(checkpoint, dtype=dtype, group=groups[0])
    spec = model.state_spec()
    scratch_bytes = shape.scratch_nbytes(spec)
    return Needs(
        num_processes=num_processes,
        dtype=str(dtype).removeprefix("torch."),
        # They differ where a part begins inside a scale block, whose scale two processes then read.
        stored_bytes=max(own_bytes(plan, checkpoint, group) for group in groups),
        weight_bytes=sum(tensor.nbytes for tensor in model.state_dict().values()),
        cache_bytes=shape.nbytes(spec) - scratch_bytes,
        scratch_bytes=scratch_bytes,
        possible=tuple(possible_sizes(checkpoint.config)),
    )
