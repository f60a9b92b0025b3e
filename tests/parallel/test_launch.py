"""What torchrun's environment means, how processes are grouped, and the watch over them, without any process."""

import io
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr

import pytest
import torch
from torch._C._distributed_c10d import HashStore, Store

from compressed_spec.launch import Process, Run, groups_of, join
from compressed_spec.parallel import ALONE, ParallelGroup, PeerError
from compressed_spec.watch import Patience, Watch

QUICK = Patience(beat=0.02, silence=0.3, grace=0.05)


def test_one_process_alone() -> None:
    for environment in ({}, {"WORLD_SIZE": "1", "RANK": "0"}):
        assert Process.from_environment(environment) == Process()
    assert Process().is_first
    assert Process().device("cuda") == "cuda"
    with join(Process(), device="cpu") as run:
        assert run == Run(process=Process())
        assert (run.group, run.num_replicas) == (ALONE, 1)
        assert run.once_per_node("it", lambda: "here") == "here"


def test_a_process_of_several() -> None:
    found = Process.from_environment({"WORLD_SIZE": "16", "RANK": "9", "LOCAL_RANK": "1", "GROUP_RANK": "1"})
    assert found == Process(rank=9, world_size=16, local_rank=1, node=1)
    assert not found.is_first
    assert found.device("cuda") == "cuda:1"
    assert found.device("cuda:3") == "cuda:3"
    assert found.device("cpu") == "cpu"
    assert found.name.startswith("rank 9 on ")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 but RANK is not set: start the processes with torchrun"),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, "GROUP_RANK is not set"),
        ({"WORLD_SIZE": "many"}, "is no number"),
        ({"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0", "GROUP_RANK": "0"}, "RANK is 2 but WORLD_SIZE 2"),
    ],
)
def test_T36_an_environment_that_makes_no_sense(environment: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Process.from_environment(environment)


def test_once_per_node() -> None:
    """Of two processes on a node one acts, and the other has what it found, or its fault; another node acts itself."""
    store, done = HashStore(), []

    def download(folder: str) -> str:
        done.append(folder)
        if folder == "nowhere":
            raise ValueError("no such repo")
        return folder

    first, second, elsewhere = (
        Run(process=Process(rank=rank, world_size=3, local_rank=rank % 2, node=rank // 2), store=store)
        for rank in range(3)
    )
    assert first.once_per_node("model", lambda: download("a")) == "a"
    assert second.once_per_node("model", lambda: download("b")) == "a"
    assert elsewhere.once_per_node("model", lambda: download("c")) == "c"
    with pytest.raises(ValueError, match="no such repo"):
        first.once_per_node("other", lambda: download("nowhere"))
    with pytest.raises(PeerError, match="no such repo"):
        second.once_per_node("other", lambda: download("d"))
    assert done == ["a", "c", "nowhere"]


def test_groups_are_neighbours() -> None:
    assert groups_of(8, 4) == [range(4), range(4, 8)]
    assert groups_of(4, 4) == [range(4)]
    assert groups_of(2, 1) == [range(1), range(1, 2)]
    for size in (3, 0):
        with pytest.raises(ValueError, match=f"8 processes cannot be divided into groups of {size}"):
            groups_of(8, size)
    with pytest.raises(ValueError, match="1 processes cannot be divided"), join(Process(), device="cpu", group_size=2):
        pass


def test_a_part_of_things() -> None:
    third = ParallelGroup(rank=2, size=4)
    assert (third.part(12), third.span(12)) == (3, range(6, 9))
    assert (ALONE.part(12), ALONE.span(12)) == (12, range(12))
    with pytest.raises(AssertionError):
        third.part(10)


def test_one_process_exchanges_nothing() -> None:
    x = torch.randn(3, 2)
    assert ALONE.all_reduce(x) is x
    assert ALONE.all_gather(x) is x
    assert ALONE.decide(lambda: 7) == 7
    ALONE.check_same("this", object())
    ALONE.check_same_bits("this", never())
    with pytest.raises(OSError), ALONE.together():
        raise OSError


def never() -> Iterator[torch.Tensor]:
    raise AssertionError("nobody to compare with")
    yield


class Ends:
    """Stands in for `os._exit`."""

    def __init__(self) -> None:
        self.codes: list[int] = []

    def __call__(self, code: int) -> None:
        self.codes.append(code)


def watching(store: Store, rank: int, ends: Ends) -> Watch:
    return Watch(lambda: store, rank=rank, size=2, loud=True, patience=QUICK, end=ends)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_fault_ends_the_others_with_its_words() -> None:
    store, ends = HashStore(), (Ends(), Ends())
    watches = [watching(store, rank, ends[rank]) for rank in range(2)]
    with redirect_stderr(said := io.StringIO()):
        for watch in watches:
            watch.start()
        watches[1].stop("rank 1 stopped with ValueError: bad weather")
        until(lambda: ends[0].codes)
    assert (ends[0].codes, ends[1].codes) == ([1], [])
    assert said.getvalue() == (
        "compressed-spec: rank 0 ends because of another process: rank 1 stopped with ValueError: bad weather\n"
    )


def test_the_first_fault_is_the_cause() -> None:
    store = HashStore()
    watches = [watching(store, rank, Ends()) for rank in range(2)]
    for watch in watches:
        watch.start()
    watches[1].stop("the cause")
    watches[0].stop("what follows from it")
    assert store.get("fault") == b"the cause"


def test_silence_ends_the_others() -> None:
    store, ends = HashStore(), Ends()
    watch = watching(store, 0, ends)
    with redirect_stderr(said := io.StringIO()):
        watch.start()
        until(lambda: ends.codes)
    assert ends.codes == [1]
    assert "rank 1 has not been heard of for 0 s" in said.getvalue()


def test_a_process_that_was_asleep_itself_blames_nobody() -> None:
    class Slow(HashStore):
        def set(self, key: str, value: str) -> None:
            time.sleep(QUICK.silence)
            super().set(key, value)

    ends = Ends()
    watch = watching(Slow(), 0, ends)
    watch.start()
    time.sleep(4 * QUICK.silence)
    watch.stop()
    assert ends.codes == []


def test_who_is_done_may_be_silent() -> None:
    store, ends = HashStore(), Ends()
    watches = [watching(store, rank, ends) for rank in range(2)]
    for watch in watches:
        watch.start()
    watches[1].stop()
    time.sleep(3 * QUICK.silence)
    watches[0].stop()
    assert ends.codes == []


def test_a_store_that_is_gone_ends_everybody() -> None:
    class Gone(HashStore):
        def set(self, key: str, value: str) -> None:
            raise RuntimeError("broken pipe")

    ends = Ends()
    with redirect_stderr(said := io.StringIO()):
        watching(Gone(), 0, ends).start()
        until(lambda: ends.codes)
    assert "the process that keeps the run together is gone" in said.getvalue()
