"""What is drawn together: one dataset and drafter at one load, all batch sizes and trees of it."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compressed_spec.measure.bootstrap import Interval
from compressed_spec.measure.compare import OFF, Group, Measure, by_group, tree_interval
from compressed_spec.measure.record import NO_DRAFTER, Results, SweepRecord
from compressed_spec.measure.reporting.selection import Load
from compressed_spec.tree import TreeShape, parse_tree

LENGTH, SPEED = Measure.ACCEPTANCE_LENGTH, Measure.DECODE_THROUGHPUT


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """A tree at a batch size. shape: None for plain decoding and trees that choose their own form."""

    name: str
    shape: TreeShape | None
    records: tuple[SweepRecord, ...]
    length: Interval
    speed: Interval

    @property
    def is_chain(self) -> bool:
        return self.shape is not None and self.shape.top_k == 1

    @property
    def results(self) -> tuple[Results, ...]:
        """One a repeat."""
        return tuple(record.results for record in self.records if record.results is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """trees: by batch size, ascending, plain decoding first where it was measured. groups: the comparisons' names."""

    dataset: str
    drafter: str
    load: Load
    trees: Mapping[int, tuple[Tree, ...]]
    groups: Mapping[int, Group]

    @property
    def first(self) -> int:
        """The smallest batch size at which something was drafted, if any."""
        drafted = [batch_size for batch_size, trees in self.trees.items() if any(one.name != OFF for one in trees)]
        return min(drafted or self.trees)

    def some(self, most: int) -> list[int]:
        """At most so many batch sizes at which something was drafted: smallest, largest, and even steps between."""
        drafted = [batch_size for batch_size in self.trees if batch_size >= self.first]
        if len(drafted) <= most:
            return drafted
        return [drafted[round(i * (len(drafted) - 1) / (most - 1))] for i in range(most)]

    def plain(self, batch_size: int) -> Tree | None:
        """Decoding without speculation."""
        return next((tree for tree in self.trees[batch_size] if tree.name == OFF), None)

    def best(self, batch_size: int, *, chain: bool) -> Tree | None:
        """The fastest chain, or the fastest tree with branches."""
        found = [one for one in self.trees[batch_size] if one.shape is not None and one.is_chain == chain]
        return max(found, key=lambda one: one.speed.estimate, default=None)

    def by_nodes(self, batch_size: int, measure: Measure, *, chain: bool) -> dict[int, Tree]:
        """Of each budget D, the chain or the best tree with branches by this measure."""
        found: dict[int, Tree] = {}
        for one in self.trees[batch_size]:
            if one.shape is None or one.is_chain != chain:
                continue
            known = found.get(one.shape.num_nodes)
            if known is None or value(one, measure).estimate > value(known, measure).estimate:
                found[one.shape.num_nodes] = one
        return dict(sorted(found.items()))


_AtBatch = tuple[Group, tuple[Tree, ...]]


def value(tree: Tree, measure: Measure) -> Interval:
    """A tree's acceptance length or its tokens a second."""
    return tree.length if measure is LENGTH else tree.speed


def lanes(records: Sequence[SweepRecord]) -> list[Lane]:
    """Lanes with at least one finished request, in order of dataset, drafter and load."""
    groups: dict[tuple[str, str, Load], dict[int, _AtBatch]] = defaultdict(dict)
    for group, trees in by_group(records).items():
        found = tuple(_tree(name, some) for name, some in trees.items() if _any_finished(some))
        if found:
            load = Load(temperature=group.temperature, arrival_rate=group.arrival_rate)
            groups[group.dataset, group.drafter, load][group.batch_size] = group, found
    _give_plain_to_drafters(groups)
    return [
        Lane(
            dataset=dataset,
            drafter=drafter,
            load=load,
            trees={batch_size: here[batch_size][1] for batch_size in sorted(here)},
            groups={batch_size: here[batch_size][0] for batch_size in sorted(here)},
        )
        for (dataset, drafter, load), here in sorted(
            groups.items(), key=lambda one: (one[0][0], one[0][1], one[0][2].temperature, one[0][2].arrival_rate or 0)
        )
    ]


def _give_plain_to_drafters(groups: dict[tuple[str, str, Load], dict[int, _AtBatch]]) -> None:
    """Batch sizes at which nothing was drafted belong to every drafter's lane, if there is one."""
    for dataset, drafter, load in list(groups):
        others = [key for key in groups if key[0] == dataset and key[2] == load and key[1] != NO_DRAFTER]
        if drafter == NO_DRAFTER and others:
            plain = groups.pop((dataset, drafter, load))
            for key in others:
                groups[key] = plain | groups[key]


def _any_finished(records: Sequence[SweepRecord]) -> bool:
    """Whether there is something to average: a request that every repeat finished."""
    indices = [
        {one.index for one in record.results.requests if one.error is None}
        for record in records
        if record.results is not None
    ]
    return bool(indices and set.intersection(*indices))


def _tree(name: str, records: Sequence[SweepRecord]) -> Tree:
    try:
        shape = parse_tree(name)
    except ValueError:
        shape = None
    return Tree(
        name=name,
        shape=shape,
        records=tuple(sorted(records, key=lambda record: record.repeat)),
        length=tree_interval(records, LENGTH),
        speed=tree_interval(records, SPEED),
    )
