"""The roofline: bytes of a step by hand, and what must rise with what."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compressed_spec.measure.planning.devices import Device, Overhead
from compressed_spec.measure.planning.roofline import PlannedModel, Roofline, distinct
from compressed_spec.measure.planning.storage import Part, Rate

READ = {Part.HYPER, Part.ATTENTION, Part.COMPRESSOR, Part.INDEXER, Part.ROUTER, Part.SHARED}
FREE = {Rate.FP32: 1e30}


def total(seconds: Any) -> float:
    return float(sum(seconds.values()))


def test_a_plain_step_reads_each_matrix_once(
    planned: Callable[..., PlannedModel], stored: Callable[[str], list[Any]], device: Callable[..., Device]
) -> None:
    """Where operations are free, a part's seconds are its bytes: those of the headers, and 6 of 256 experts."""
    seconds = Roofline(planned("v4_flash"), device(flops=FREE)).verify(1, 1, 1)
    # Matrices, and the scales that lie beside them; position biases are added, tables looked up.
    layers = [
        one
        for one in stored("v4_flash")
        if one.num_dims > 1 and one.name.startswith("layers.") and not one.name.endswith((".ape", ".tid2eid"))
    ]
    dense = sum(one.num_bytes for one in layers if ".experts." not in one.name)
    head_hyper = 4 * 16384 * 4
    assert sum(seconds[part] for part in READ) == pytest.approx((dense + head_hyper) / 1e12, rel=1e-9)
    experts = sum(one.num_bytes for one in layers if ".experts." in one.name)
    assert seconds[Part.EXPERTS] == pytest.approx(experts * 6 / 256 / 1e12, rel=1e-9)
    assert seconds[Part.HEAD] == pytest.approx((129280 * 4096 * 2 + 3 * 129280 * 4) / 1e12, rel=1e-9)
    # One token back: a row of each of 43 layers' windows; nothing is compressed yet.
    assert seconds[Part.WINDOW] == pytest.approx(43 * 512 * 2 / 1e12)
    assert seconds[Part.ENTRIES] == 0
    assert seconds[Part.DRAFT_INPUT] == pytest.approx(2 * (4096 * 4096 + 32 * 32) / 1e12)


def test_history_of_a_long_context(planned: Callable[..., PlannedModel], device: Callable[..., Device]) -> None:
    seconds = Roofline(planned("v4_flash"), device(flops=FREE)).verify(2, 2, 2**20)
    entries = 2**20 // 4
    assert seconds[Part.WINDOW] == pytest.approx(2 * 43 * 128 * 512 * 2 / 1e12)
    assert seconds[Part.ENTRIES] == pytest.approx(2 * (20 * 2**20 // 128 + 21 * 512) * 512 * 2 / 1e12)
    weights = Roofline(planned("v4_flash"), device(flops=FREE)).verify(2, 2, 1)[Part.INDEXER]
    keys, scores = 2 * entries * 128 * 2, 3 * 2 * entries * 4
    assert seconds[Part.INDEXER] - weights == pytest.approx(21 * (keys + scores) / 1e12)


def test_products_where_bytes_are_free(planned: Callable[..., PlannedModel], device: Callable[..., Device]) -> None:
    """Two operations a weight and node, of the 13 billion active parameters; ranks share some of them."""
    one = Roofline(planned("v4_flash"), device(bandwidth=1e30)).verify(1, 1, 1)
    active = total(one) * 1e15 / 2
    assert 12.5e9 < active < 14e9
    eight = Roofline(planned("v4_flash", 8), device(bandwidth=1e30)).verify(1, 1, 1)
    assert one[Part.EXPERTS] / eight[Part.EXPERTS] == pytest.approx(8)
    assert one[Part.SHARED] == eight[Part.SHARED]


def test_all_reduces_and_launches(planned: Callable[..., PlannedModel], device: Callable[..., Device]) -> None:
    """Two sums a layer, the embedding's and the logits'; an index score's where there is a choice to make."""
    machine = device(link_seconds=1.0, launch_seconds=1e-6)
    assert Part.ALL_REDUCE not in Roofline(planned("v4_flash"), machine).verify(1, 1, 4096)
    short = Roofline(planned("v4_flash", 8), machine).verify(1, 1, 2048)
    assert short[Part.ALL_REDUCE] == 2 * 43 + 2
    assert Roofline(planned("v4_flash", 8), machine).verify(1, 1, 2052)[Part.ALL_REDUCE] == 2 * 43 + 2 + 21
    assert short[Part.LAUNCHES] > 43 * 20e-6
    slow_link = device(link_bandwidth=1e9)
    sums = 2 * 43 * 4096 * 4 + 4096 * 2 + 129280 * 4 / 2
    seconds = Roofline(planned("v4_flash", 8), slow_link).verify(1, 3, 1)[Part.ALL_REDUCE]
    assert seconds == pytest.approx(3 * 2 * 7 / 8 * sums / 1e9)


def test_drafting(planned: Callable[..., PlannedModel], device: Callable[..., Device]) -> None:
    roofline = Roofline(planned("v4_flash"), device(flops=FREE))
    one = roofline.draft(1, [1], 100)
    assert total(roofline.draft(1, [], 100)) == 0
    assert total(roofline.draft(1, [1, 1, 1], 100)) == pytest.approx(3 * total(one))
    # A step reads the vocabulary head once more, which is shared, and 6 experts of its own.
    assert one[Part.HEAD] == pytest.approx((129280 * 4096 * 2 + 3 * 129280 * 4) / 1e12)
    block = Roofline(planned("v4_flash_0731"), device(flops=FREE))
    # DSpark's block is one pass: further steps add a table each, not a head.
    more = total(block.draft(1, [1, 1], 100)) - total(block.draft(1, [1], 100))
    assert more == pytest.approx((2 * 129280 * 256 + 4352) * 2 / 1e12)


def test_measured_overhead_takes_the_place_of_launches(
    planned: Callable[..., PlannedModel], device: Callable[..., Device]
) -> None:
    overhead = Overhead(num_layers=43, verify=(1.0, 2.0, 3.0, 4.0, 5.0), draft=(4.0, 5.0, 6.0))
    roofline = Roofline(planned("v4_flash"), device(overhead=overhead, launch_seconds=1e9))
    experts = 256 * (1 - (250 / 256) ** 7)
    assert roofline.verify(2, 7, 10)[Part.LAUNCHES] == pytest.approx(1 + 2 * 2 + 3 * 7 + 4 * 70 + 5 * experts)
    assert roofline.draft(2, [1, 3, 3], 10)[Part.LAUNCHES] == 4 + 5 * 3 + 6 * 2 * (1 + 2 * 3)


def test_a_machine_measured_for_another_model(
    planned: Callable[..., PlannedModel], device: Callable[..., Device]
) -> None:
    overhead = Overhead(num_layers=8, verify=(1.0,) * 5, draft=(1.0,) * 3)
    with pytest.raises(ValueError, match="a model of 8 layers, not 43"):
        Roofline(planned("v4_flash"), device(overhead=overhead))


def test_distinct_of_simulated_choices() -> None:
    rng = random.Random(1)
    draws = [len({e for _ in range(5) for e in rng.sample(range(16), 3)}) for _ in range(4000)]
    assert distinct(16, 3, 5) == pytest.approx(sum(draws) / len(draws), abs=0.1)
    assert distinct(16, 3, 1) == pytest.approx(3)
    assert distinct(0, 3, 5) == 0
    assert distinct(2, 3, 4) == 2


sizes = st.integers(1, 64)


@settings(max_examples=25, deadline=None)
@given(rows=sizes, per_row=st.integers(1, 16), context=st.integers(1, 2**20 - 1), gather=st.booleans())
def test_more_takes_longer(
    planned: Callable[..., PlannedModel],
    device: Callable[..., Device],
    rows: int,
    per_row: int,
    context: int,
    gather: bool,
) -> None:
    machine = device(gather_bandwidth=1e10 if gather else 0.0, overlaps=not gather, link_seconds=1e-6)
    roofline = Roofline(planned("v4_flash", 8), machine)
    here = total(roofline.verify(rows, rows * per_row, context))
    assert total(roofline.verify(rows, rows * per_row + 1, context)) > here
    assert total(roofline.verify(rows + 1, (rows + 1) * per_row, context)) > here
    assert total(roofline.verify(rows, rows * per_row, context + 1)) >= here
    drafting = total(roofline.draft(rows, [1, per_row], context))
    assert total(roofline.draft(rows, [1, per_row, per_row], context)) > drafting
    assert total(roofline.draft(rows, [1, per_row + 1], context)) > drafting


@settings(max_examples=15, deadline=None)
@given(
    rows=sizes, context=st.integers(1, 2**20), factor=st.floats(1.01, 10), name=st.sampled_from(["bandwidth", "flops"])
)
def test_better_machines_are_no_slower(
    planned: Callable[..., PlannedModel],
    device: Callable[..., Device],
    rows: int,
    context: int,
    factor: float,
    name: str,
) -> None:
    faster = device(bandwidth=1e12 * factor) if name == "bandwidth" else device(flops={Rate.FP32: 1e15 * factor})
    model = planned("v4_flash")
    before = Roofline(model, device()).verify(rows, 4 * rows, context)
    after = Roofline(model, faster).verify(rows, 4 * rows, context)
    assert all(after[part] <= seconds for part, seconds in before.items())
