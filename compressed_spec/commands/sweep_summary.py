"""What a sweep shows, in tables for a terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from compressed_spec.measure.bootstrap import Interval
from compressed_spec.measure.compare import (
    Comparison,
    Group,
    Measure,
    against_off,
    best_of_each,
    by_group,
    equal_budget,
    tree_interval,
)
from compressed_spec.measure.record import SweepRecord

LENGTH, SPEED = Measure.ACCEPTANCE_LENGTH, Measure.DECODE_THROUGHPUT
_UNCERTAIN = "~"


def print_comparisons(records: Sequence[SweepRecord], console: Console) -> None:
    """A group's trees, then its chains against its trees. A mark says where this run shows no difference.

    tokens/s: of decoding, prefill apart.
    """
    comparisons: list[Comparison] = []
    for group, trees in by_group(records).items():
        mine = [record for some in trees.values() for record in some]
        plain = against_off(mine, SPEED)
        console.print(_trees_table(group, trees, plain))
        for one in plain:
            if one.same_outputs != one.num_requests:
                console.print(f"{one.second}: {one.same_outputs} of {one.num_requests} texts are plain decoding's")
        pairs = equal_budget(mine, LENGTH), equal_budget(mine, SPEED)
        best = best_of_each(mine, LENGTH) + best_of_each(mine, SPEED)
        if pairs[0] or best:
            console.print(_chain_table(*pairs, best))
        comparisons += [*plain, *pairs[0], *pairs[1], *best]
    if any(one.overlap for one in comparisons):
        console.print(
            f"{_UNCERTAIN} the intervals overlap: a difference is not certain; run more --requests, --repeats"
        )
    if any(one.num_repeats == 1 for one in comparisons):
        console.print("Measured once: the machine's ups and downs are not in the intervals of tokens/s; use --repeats.")


def _trees_table(group: Group, trees: dict[str, list[SweepRecord]], plain: Sequence[Comparison]) -> Table:
    rate = "" if group.arrival_rate is None else f", {group.arrival_rate:g} requests/s"
    title = f"{group.dataset}, {group.drafter}, batch {group.batch_size}, T {group.temperature:g}{rate}"
    table = Table("tree", "tokens a round", "tokens/s", "gain on off", title=title)
    gains = {one.second: one for one in plain}
    for tree, some in trees.items():
        one = gains.get(tree)
        table.add_row(
            tree,
            _cell(tree_interval(some, LENGTH), ".2f"),
            _cell(tree_interval(some, SPEED), ".4g"),
            "" if one is None else _gain(one),
        )
    return table


def _chain_table(lengths: Sequence[Comparison], speeds: Sequence[Comparison], best: Sequence[Comparison]) -> Table:
    """Equal budget by row, both measures; then the best of each, one row a measure."""
    table = Table("D", "chain", "tree", "tokens a round", "tokens/s", title="gain of tree on chain")
    for length, speed in zip(lengths, speeds, strict=True):
        table.add_row(str(length.num_nodes), length.first, length.second, _gain(length), _gain(speed))
    table.add_section()
    for one in best:
        cells = (_gain(one), "") if one.measure is LENGTH else ("", _gain(one))
        table.add_row("any", one.first, one.second, *cells)
    return table


def _gain(one: Comparison) -> str:
    gain, mark = one.gain, f" {_UNCERTAIN}" if one.overlap else ""
    return rf"{gain.estimate:+.1%} \[{gain.low:+.0%}, {gain.high:+.0%}]{mark}"


def _cell(one: Interval, digits: str) -> str:
    return rf"{one.estimate:{digits}} \[{one.low:{digits}}, {one.high:{digits}}]"
