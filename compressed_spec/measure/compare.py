"""Whether one way to decode beats another: chain or tree at equal budget, the best of each at any, plain decoding.

Every measure is a ratio of sums over requests: tokens over rounds, or tokens over the seconds that were the request's
share. Both sides ran the same prompts in the same repeats, and what one of them did not finish counts for neither.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum

import numpy as np

from compressed_spec.measure.bootstrap import Interval, RatioSums, gain_interval
from compressed_spec.measure.record import RequestRecord, SweepRecord
from compressed_spec.tree import TreeShape, parse_tree

OFF = "off"


class Measure(Enum):
    """acceptance_length: tokens emitted a round. decode_throughput: tokens after each request's first, per second that
    was not prefill. output_throughput: all tokens, per second."""

    ACCEPTANCE_LENGTH = "acceptance_length"
    DECODE_THROUGHPUT = "decode_throughput"
    OUTPUT_THROUGHPUT = "output_throughput"


_PARTS: Mapping[Measure, Callable[[RequestRecord], tuple[float, float]]] = {
    Measure.ACCEPTANCE_LENGTH: lambda one: (one.whole_tokens, one.whole_rounds),
    Measure.DECODE_THROUGHPUT: lambda one: (max(one.completion_tokens - 1, 0), one.decode_seconds),
    Measure.OUTPUT_THROUGHPUT: lambda one: (one.completion_tokens, one.prefill_seconds + one.decode_seconds),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """What is equal on both sides of a comparison. conditions: hash of setup, prompts, versions, revision, machine."""

    dataset: str
    drafter: str
    batch_size: int
    temperature: float
    arrival_rate: float | None
    conditions: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`second` against `first`. gain: second / first - 1, paired by request and repeat. num_nodes: the verify budget D,
    None where it differs. same_outputs: requests that gave the same tokens in all repeats of both, None for the best of
    each. overlap: the two intervals share a value. warning: what to beware of, if anything."""

    measure: Measure
    group: Group
    first: str
    second: str
    num_nodes: int | None
    first_interval: Interval
    second_interval: Interval
    gain: Interval
    num_requests: int
    num_repeats: int
    same_outputs: int | None
    overlap: bool
    warning: str | None


def by_group(records: Iterable[SweepRecord]) -> dict[Group, dict[str, list[SweepRecord]]]:
    """Finished records by group and tree, plain decoding first; it is in the group of every drafter."""
    found: dict[Group, dict[str, list[SweepRecord]]] = defaultdict(lambda: defaultdict(list))
    finished = [record for record in records if record.results is not None]
    for record in finished:
        if record.tree != OFF:
            found[_group(record, record.drafter)][record.tree].append(record)
    for record in finished:
        if record.tree == OFF:
            groups = [group for group in found if group == _group(record, group.drafter)]
            for group in groups or [_group(record, record.drafter)]:
                found[group][OFF].append(record)
    return {group: dict(sorted(trees.items(), key=lambda item: item[0] != OFF)) for group, trees in found.items()}


def equal_budget(records: Iterable[SweepRecord], measure: Measure) -> list[Comparison]:
    """Each chain (first) against every tree (second) that verifies as many nodes, everything else equal."""
    return [
        compare(group, chain, trees[chain], tree, trees[tree], measure)
        for group, trees in by_group(records).items()
        for chain, chain_shape in _shapes(trees).items()
        for tree, shape in _shapes(trees).items()
        if chain_shape.top_k == 1 < shape.top_k
        and shape.num_nodes == chain_shape.num_nodes
        and _pair([trees[chain], trees[tree]])
    ]


def best_of_each(records: Iterable[SweepRecord], measure: Measure) -> list[Comparison]:
    """The best chain (first) against the best tree (second), whatever their budgets.

    The best of many is partly lucky, and of more candidates luckier. So each half of the requests (every other one) is
    judged with the two that were best on the other half; the names are of the best on all of them. Groups with fewer
    than two requests that all finished, without a chain or without a tree are left out.
    """
    found = []
    for group, trees in by_group(records).items():
        shapes = _shapes(trees)
        pairing = _pair([trees[name] for name in shapes]) if shapes else None
        if pairing is None or len(pairing.requests) < 2 or len({shape.top_k > 1 for shape in shapes.values()}) < 2:
            continue
        sums = dict(zip(shapes, pairing.sums(measure), strict=True))
        chains = {name: one for name, one in sums.items() if shapes[name].top_k == 1}
        others = {name: one for name, one in sums.items() if shapes[name].top_k > 1}
        chain, tree = _best(chains), _best(others)
        found.append(_comparison(group, chain, _held_out(chains), tree, _held_out(others), measure, None))
    return found


def against_off(records: Iterable[SweepRecord], measure: Measure) -> list[Comparison]:
    """Plain decoding (first) against every tree (second)."""
    return [
        compare(group, OFF, trees[OFF], tree, some, measure)
        for group, trees in by_group(records).items()
        for tree, some in trees.items()
        if tree != OFF and OFF in trees and _pair([trees[OFF], some])
    ]


def compare(
    group: Group,
    first: str,
    first_records: Sequence[SweepRecord],
    second: str,
    second_records: Sequence[SweepRecord],
    measure: Measure,
) -> Comparison:
    """Two trees over the repeats and requests that both finished. Raises ValueError if there are none."""
    pairing = _pair([first_records, second_records])
    if pairing is None:
        raise ValueError(f"No request was finished in a repeat of both {first} and {second}: run more of them.")
    one, other = pairing.sums(measure)
    return _comparison(group, first, one, second, other, measure, pairing.num_same_outputs())


def tree_interval(records: Sequence[SweepRecord], measure: Measure) -> Interval:
    """One tree's measure, over its repeats and finished requests. Raises ValueError if there are none."""
    pairing = _pair([records])
    if pairing is None:
        raise ValueError("No request was finished in all repeats, so there is nothing to measure: run more.")
    return pairing.sums(measure)[0].interval()


def _group(record: SweepRecord, drafter: str) -> Group:
    environment = {name: value for name, value in asdict(record.environment).items() if name != "argv"}
    conditions = {
        "setup": {**asdict(record.setup), "model": None},
        "prompts": record.prompts_hash,
        "environment": environment,
    }
    return Group(
        dataset=record.dataset,
        drafter=drafter,
        batch_size=record.batch_size,
        temperature=record.temperature,
        arrival_rate=record.arrival_rate,
        conditions=hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:16],
    )


def _shapes(trees: Iterable[str]) -> dict[str, TreeShape]:
    """Of the trees with a fixed shape sN_kK_dD."""
    found = {}
    for tree in trees:
        try:
            shape = parse_tree(tree)
        except ValueError:  # "auto" and the like
            continue
        if shape is not None:
            found[tree] = shape
    return found


def _best(candidates: Mapping[str, RatioSums]) -> str:
    return max(candidates, key=lambda name: candidates[name].ratio())


def _held_out(candidates: Mapping[str, RatioSums]) -> RatioSums:
    """Each half of the requests with the candidate that is best on the other half."""
    count = next(iter(candidates.values())).num_requests
    halves = [list(range(0, count, 2)), list(range(1, count, 2))]
    parts = []
    for mine, others in (halves, halves[::-1]):
        best = _best({name: sums.take(others) for name, sums in candidates.items()})
        parts.append(candidates[best].take(mine))
    return RatioSums.join(parts)


def _comparison(
    group: Group, first: str, one: RatioSums, second: str, other: RatioSums, measure: Measure, same_outputs: int | None
) -> Comparison:
    shapes = _shapes([first, second])
    budgets = {shape.num_nodes for shape in shapes.values()}
    first_interval, second_interval, gain = one.interval(), other.interval(), gain_interval(one, other)
    overlap = first_interval.overlaps(second_interval)
    warnings = []
    if gain.low <= 0 <= gain.high:
        warnings.append("the gain's interval holds 0: no difference is shown")
    if overlap:
        warnings.append("the intervals of the two overlap")
    if one.num_repeats == 1 and measure is not Measure.ACCEPTANCE_LENGTH:
        warnings.append("one repeat: the machine's ups and downs are not in the intervals")
    return Comparison(
        measure=measure,
        group=group,
        first=first,
        second=second,
        num_nodes=budgets.pop() if len(shapes) == 2 and len(budgets) == 1 else None,
        first_interval=first_interval,
        second_interval=second_interval,
        gain=gain,
        num_requests=one.num_requests,
        num_repeats=one.num_repeats,
        same_outputs=same_outputs,
        overlap=overlap,
        warning="; ".join(warnings) or None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pairing:
    """Repeats and requests that all sides finished, and each side's requests, by repeat."""

    repeats: tuple[int, ...]
    requests: tuple[int, ...]
    sides: tuple[Mapping[int, Sequence[RequestRecord]], ...]

    def sums(self, measure: Measure) -> list[RatioSums]:
        """One a side."""
        found = []
        for side in self.sides:
            parts_RN2 = np.array(
                [[_PARTS[measure](side[repeat][index]) for index in self.requests] for repeat in self.repeats],
                dtype=np.float64,
            )
            found.append(RatioSums(above_RN=parts_RN2[:, :, 0], below_RN=parts_RN2[:, :, 1]))
        return found

    def num_same_outputs(self) -> int:
        """Requests whose tokens never differ."""
        outputs = (
            {side[repeat][index].output_hash for side in self.sides for repeat in self.repeats}
            for index in self.requests
        )
        return sum(len(some) == 1 for some in outputs)


def _pair(sides: Sequence[Sequence[SweepRecord]]) -> _Pairing | None:
    """None if there is nothing that all finished."""
    by_repeat = tuple({record.repeat: record.results.requests for record in side if record.results} for side in sides)
    repeats = set.intersection(*(set(side) for side in by_repeat))
    finished = [{one.index for one in side[repeat] if one.error is None} for side in by_repeat for repeat in repeats]
    requests = set.intersection(*finished) if finished else set()
    if not requests:
        return None
    return _Pairing(repeats=tuple(sorted(repeats)), requests=tuple(sorted(requests)), sides=by_repeat)
