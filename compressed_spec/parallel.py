"""The processes that hold one model together, and what they exchange.

A `ParallelGroup` is handed to whoever needs it. For one process alone every exchange is the identity.
"""

import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
import torch.distributed as dist

T = TypeVar("T")
_INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class PeerError(RuntimeError):
    """Another process failed, left, or came to another result. Whoever gets this one cannot go on either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelGroup:
    """Processes that each hold a part of the heads, experts and vocabulary, and all of the state.

    rank: this one's place among `size`. handle: torch's group, None where nothing is to be exchanged: one process
    alone, or a description of another process's part. name: what this process is called in messages.

    Every process of a group must call the same methods in the same order. They raise PeerError if another is gone.
    """

    rank: int = 0
    size: int = 1
    handle: dist.ProcessGroup | None = None
    name: str = "this process"

    @property
    def is_first(self) -> bool:
        """Whether this process decides what is decided once."""
        return self.rank == 0

    def part(self, total: int) -> int:
        """How much of `total` equal things one process has."""
        assert total % self.size == 0, f"{total} does not divide by {self.size}"
        return total // self.size

    def span(self, total: int) -> range:
        """Which of them this process has."""
        count = self.part(total)
        return range(self.rank * count, (self.rank + 1) * count)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all processes' tensors, taken in float32 or wider: the same bits on each of them."""
        if self.size == 1:
            return x
        total = x.to(torch.promote_types(x.dtype, torch.float32), copy=True).contiguous()
        with _exchange():
            dist.all_reduce(total, group=self.handle)
        return total.to(x.dtype)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """All processes' tensors, one after the other along the last dimension."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        with _exchange():
            dist.all_gather(parts, x.contiguous(), group=self.handle)
        return torch.cat(parts, dim=-1)

    def decide(self, make: Callable[[], T]) -> T:
        """What `make` returns on the first process, on all of them. If it raises there, the others raise PeerError."""
        if self.size == 1:
            return make()
        if not self.is_first:
            made, fault = self._broadcast(None)
            if fault is not None:
                raise PeerError(fault)
            return cast(T, made)
        try:
            value = make()
        except BaseException as error:
            self._broadcast((None, f"{self.name} failed: {type(error).__name__}: {error}"))
            raise
        self._broadcast((value, None))
        return value

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block, without exchanges, that all processes leave in the same way.

        Where some raise ValueError or OSError, the first of them does so here too, and all others raise PeerError with
        its words.
        """
        if self.size == 1:
            yield
            return
        fault: ValueError | OSError | None = None
        try:
            yield
        except (ValueError, OSError) as error:
            fault = error
        reports: list[str | None] = [None] * self.size
        with _exchange():
            dist.all_gather_object(reports, fault and f"{self.name}: {fault}", group=self.handle)
        first = next((rank for rank, report in enumerate(reports) if report is not None), None)
        if first == self.rank and fault is not None:
            raise fault
        if first is not None:
            raise PeerError(reports[first])

    def check_same(self, what: str, value: object) -> None:
        """Raise PeerError on every process unless `value` has the same `repr` on all of them."""
        if self.size > 1:
            self._compare(what, torch.tensor([zlib.crc32(repr(value).encode())]))

    def check_same_bits(self, what: str, tensors: Iterable[torch.Tensor]) -> None:
        """Raise PeerError on every process unless the bits of these tensors add up to the same on all of them."""
        if self.size > 1:
            sums = [x.contiguous().view(_INTS[x.element_size()]).sum(dtype=torch.int64) for x in tensors]
            self._compare(what, torch.stack(sums).sum().view(1))

    def _compare(self, what: str, mine: torch.Tensor) -> None:
        sums = self.all_gather(mine).tolist()
        if len(set(sums)) > 1:
            usual = max(sums, key=sums.count)
            odd = [rank for rank, one in enumerate(sums) if one != usual]
            raise PeerError(
                f"The processes disagree about {what}: {', '.join(map(str, odd))} of {self.size} differ from the rest. "
                "Use the same code, checkpoint, options and kind of device for all of them."
            )

    def _broadcast(self, value: object) -> tuple[object, str | None]:
        """The first process's value."""
        data = pickle.dumps(value) if self.is_first else b""
        size = torch.tensor([len(data)])
        with _exchange():
            dist.broadcast(size, group_src=0, group=self.handle)
            raw = torch.frombuffer(bytearray(data or int(size)), dtype=torch.uint8)
            dist.broadcast(raw, group_src=0, group=self.handle)
        got: tuple[object, str | None] = pickle.loads(raw.numpy().tobytes())
        return got


ALONE = ParallelGroup()


@contextmanager
def _exchange() -> Iterator[None]:
    """torch's word for a broken connection, whatever the backend, is RuntimeError."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise PeerError(f"Another process of this run is gone ({reason}).") from error
