"""One plain recommendation, of nothing that the intervals do not support.

At each batch size, over the requests of all datasets together: a tree is worth naming only if the interval of its gain
over plain decoding lies above 0 and none is shown to be faster. The best of many is partly lucky, so choosing it must
win too: each half of the requests is decoded with what was best on the other half. Otherwise speculation stays off. Of
what remains, the advice takes what holds for the most batch sizes, and of that the simplest: a chain before a tree,
fewer nodes before more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from compressed_spec.measure.bootstrap import Interval
from compressed_spec.measure.compare import Comparison
from compressed_spec.measure.record import RequestRecord, SweepRecord
from compressed_spec.measure.reporting.selection import (
    PLAIN,
    ByMode,
    Load,
    Mode,
    comparison,
    group_of,
    pooled,
    with_requests,
)
from compressed_spec.tree import parse_tree

LUCKY = Mode(tree="the best of the other half", drafter="any")
FEWEST_REQUESTS = 8  # an interval of fewer is too narrow to be believed


class Reason(StrEnum):
    """Why a mode is recommended, as the page says it."""

    FASTEST = "shown to be the fastest"
    AS_GOOD = "none is shown to be faster"
    SLOWER = "every other way is slower"
    NOT_SHOWN = "no other way is shown to be faster"
    LUCK = "what is best on half of the requests does not win on the other half"
    TOO_LITTLE = "too little was measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What to use at a batch size; `mode` is PLAIN for speculation off, None where too little was measured to tell.

    gain: over plain decoding, of the mode or, if off, of the fastest other. gains: of all that would do as well.
    """

    batch_size: int
    mode: Mode | None
    gain: Interval | None
    reason: Reason
    gains: Mapping[Mode, Interval] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """The verdicts of one load, and what they come to in a sentence. single_repeat: the machine's ups and downs are not
    in the intervals."""

    load: Load
    verdicts: tuple[Verdict, ...]
    sentence: str
    single_repeat: bool


def advise(records: Sequence[SweepRecord]) -> list[Advice]:
    """One advice a load, in order."""
    points = pooled(records)
    loads = sorted({load for load, _ in points}, key=lambda load: (load.temperature, load.arrival_rate or 0.0))
    several = len({mode.drafter for modes in points.values() for mode in modes} - {PLAIN.drafter}) > 1
    found = []
    for load in loads:
        here = {batch_size: modes for (some, batch_size), modes in sorted(points.items(), key=lambda one: one[0][1])
                if some == load}  # fmt: skip
        verdicts = tuple(_coherent([_verdict(batch_size, modes) for batch_size, modes in here.items()]))
        sentence = _sentence(verdicts, several)
        if len(loads) > 1:
            sentence = f"At {load}: {sentence}"
        repeats = {len(some) for modes in here.values() for some in modes.values()}
        found.append(Advice(load=load, verdicts=verdicts, sentence=sentence, single_repeat=repeats == {1}))
    return found


def _verdict(batch_size: int, modes: ByMode) -> Verdict:
    others = [mode for mode in modes if not mode.is_off and not _failed_more(modes, mode)]
    pairs = {mode: _compare(modes, PLAIN, mode) for mode in others if PLAIN in modes}
    on_plain = {mode: one for mode, one in pairs.items() if one is not None}
    if not on_plain:
        return Verdict(batch_size=batch_size, mode=None, gain=None, reason=Reason.TOO_LITTLE)
    best = max(on_plain, key=lambda mode: on_plain[mode].gain.estimate)
    winners = [mode for mode, one in on_plain.items() if one.gain.low > 0]
    mode: Mode | None = PLAIN
    shown = on_plain[best].gain
    if on_plain[best].num_requests < FEWEST_REQUESTS:
        mode, reason = None, Reason.TOO_LITTLE
    elif all(one.gain.high < 0 for one in on_plain.values()):
        reason = Reason.SLOWER
    elif not winners:
        reason = Reason.NOT_SHOWN
    elif _gain(modes | {LUCKY: _held_out(modes, list(on_plain))}, PLAIN, LUCKY).low <= 0:
        reason = Reason.LUCK
    else:
        as_good = [one for one in winners if one == best or _gain(modes, one, best).low <= 0]
        mode = min(as_good, key=_simplicity)
        return Verdict(
            batch_size=batch_size,
            mode=mode,
            gain=on_plain[mode].gain,
            reason=Reason.AS_GOOD if len(as_good) > 1 else Reason.FASTEST,
            gains={one: on_plain[one].gain for one in as_good},
        )
    return Verdict(batch_size=batch_size, mode=mode, gain=shown, reason=reason)


def _coherent(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The same verdicts with one mode for as many batch sizes in a row as it does as well as any."""
    found: list[Verdict] = []
    while len(found) < len(verdicts):
        rest = verdicts[len(found) :]
        shared, count = set(rest[0].gains), 1
        while count < len(rest) and shared & rest[count].gains.keys():
            shared &= rest[count].gains.keys()
            count += 1
        if not shared:
            found.append(rest[0])
            continue
        mode = min(shared, key=_simplicity)
        found += [replace(one, mode=mode, gain=one.gains[mode]) for one in rest[:count]]
    return found


def _compare(modes: ByMode, first: Mode, second: Mode) -> Comparison | None:
    records = modes[second]
    return comparison(group_of(records[0]), first.tree, modes[first], second.tree, records)


def _gain(modes: ByMode, first: Mode, second: Mode) -> Interval:
    """Of second over first; the worst where there is nothing to compare."""
    found = _compare(modes, first, second)
    return Interval(estimate=-1.0, low=-1.0, high=-1.0) if found is None else found.gain


def _held_out(modes: ByMode, others: Sequence[Mode]) -> list[SweepRecord]:
    """Records each half of whose requests, every other one, is of the mode that is best on the other half."""
    halves = [{mode: [_half(one, parity) for one in some] for mode, some in modes.items()} for parity in (0, 1)]
    best = [max(others, key=lambda mode: _gain(half, PLAIN, mode).estimate) for half in halves]
    joined = []
    for even, odd in zip(modes[best[1]], modes[best[0]], strict=True):
        pairs = zip(_requests(even), _requests(odd), strict=True)
        joined.append(with_requests(even, [pair[place % 2] for place, pair in enumerate(pairs)]))
    return joined


def _half(record: SweepRecord, parity: int) -> SweepRecord:
    return with_requests(record, _requests(record)[parity::2])


def _requests(record: SweepRecord) -> Sequence[RequestRecord]:
    assert record.results is not None, "failed records are left out"
    return record.results.requests


def _failed_more(modes: ByMode, mode: Mode) -> bool:
    """Whether requests failed that plain decoding answers; such a mode is not recommended, however fast."""
    return _num_failed(modes[mode]) > _num_failed(modes.get(PLAIN, ()))


def _num_failed(records: Sequence[SweepRecord]) -> int:
    return sum(one.error is not None for record in records for one in _requests(record))


def _simplicity(mode: Mode) -> tuple[int, int, str, str]:
    """Chains, then trees, then what chooses its own form; fewer nodes first."""
    try:
        shape = parse_tree(mode.tree)
    except ValueError:
        return (2, 0, mode.tree, mode.drafter)
    assert shape is not None, "plain decoding is no candidate"
    return (int(shape.top_k > 1), shape.num_nodes, mode.tree, mode.drafter)


def _sentence(verdicts: Sequence[Verdict], name_drafter: bool) -> str:
    runs: list[list[Verdict]] = []
    for verdict in verdicts:
        if runs and _alike(runs[-1][-1], verdict):
            runs[-1].append(verdict)
        else:
            runs.append([verdict])
    parts = [_clause(run, _where(run, first=run is runs[0], last=run is runs[-1]), name_drafter) for run in runs]
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def _alike(one: Verdict, other: Verdict) -> bool:
    return one.mode == other.mode and (one.reason is Reason.SLOWER) == (other.reason is Reason.SLOWER)


def _where(run: Sequence[Verdict], *, first: bool, last: bool) -> str:
    low, high = run[0].batch_size, run[-1].batch_size
    if first and last:
        return f"at batch {low}" if low == high else f"at batch {low} to {high}"
    if first:
        return f"at batch {high}" if low == high == 1 else f"at batch <= {high}"
    if last:
        return f"from batch {low}"
    return f"at batch {low}" if low == high else f"at batch {low} to {high}"


def _clause(run: Sequence[Verdict], where: str, name_drafter: bool) -> str:
    mode = run[0].mode
    if mode is None:
        return f"no advice {where}, where too little was measured"
    if mode.is_off:
        loses = "is slower" if run[0].reason is Reason.SLOWER else "is not shown to be faster"
        return f"speculation off {where}, where it {loses}"
    drafter = f" with {mode.drafter}" if name_drafter else ""
    gains = [verdict.gain.estimate for verdict in run if verdict.gain is not None]
    low, high = min(gains), max(gains)
    gain = f"{low:+.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:+.0%} to {high:+.0%}"
    return f"use {mode.tree}{drafter} {where} ({gain} tokens/s)"
