"""Several processes that decode the same (torchrun): the first alone prints and writes, and what depends on clocks or
files is decided by it."""

from typing import TypeVar

import torch.distributed as dist

from compressed_spec.launch import Process

T = TypeVar("T")


def is_first_process() -> bool:
    """Whether this process prints and writes: rank 0 of torchrun's, or the only one."""
    return Process.from_environment().is_first


def num_processes() -> int:
    """Processes that decode together."""
    return Process.from_environment().world_size


def from_first(value: T) -> T:
    """The first process's value (picklable) in every process; call it everywhere, in the same order."""
    if num_processes() == 1:
        return value
    assert dist.is_initialized(), "processes that decode together have a group"
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]
