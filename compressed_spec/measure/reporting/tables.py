"""Numbers behind the pictures, as pandas frames."""

from typing import TYPE_CHECKING

from compressed_spec.measure.bootstrap import Interval
from compressed_spec.measure.compare import OFF, Comparison
from compressed_spec.measure.reporting.lanes import SPEED, Lane, Tree
from compressed_spec.measure.reporting.selection import comparison

if TYPE_CHECKING:
    from pandas import DataFrame


def gain_frames(lane: Lane) -> "tuple[DataFrame, DataFrame] | None":
    """Gain on plain decoding of the fastest mode of each D (columns) by batch size (rows), and whether it may be none.

    None where no batch size has both.
    """
    import pandas

    cells = []
    for batch_size in lane.trees:
        plain = lane.plain(batch_size)
        if plain is None:
            continue
        fastest: dict[int, Tree] = {}
        for chain in (True, False):
            for nodes, tree in lane.by_nodes(batch_size, SPEED, chain=chain).items():
                known = fastest.get(nodes)
                if known is None or tree.speed.estimate > known.speed.estimate:
                    fastest[nodes] = tree
        for nodes, tree in fastest.items():
            on_plain = _on_plain(lane, batch_size, plain, tree)
            if on_plain is not None:
                gain = on_plain.gain
                uncertain = gain.low <= 0 <= gain.high
                cells.append({"batch": batch_size, "D": nodes, "gain": gain.estimate, "uncertain": uncertain})
    if not cells:
        return None
    frame = pandas.DataFrame(cells)
    gain_frame = frame.pivot(index="batch", columns="D", values="gain")
    return gain_frame, frame.pivot(index="batch", columns="D", values="uncertain").eq(True)


def _on_plain(lane: Lane, batch_size: int, plain: Tree, tree: Tree) -> Comparison | None:
    return comparison(lane.groups[batch_size], OFF, plain.records, tree.name, tree.records)


def point_frame(lane: Lane) -> "DataFrame":
    """One line a point: what was measured, means over repeats, with intervals."""
    import pandas

    lines = []
    for batch_size, trees in lane.trees.items():
        plain = lane.plain(batch_size)
        for tree in trees:
            gain = None if plain is None or tree is plain else _on_plain(lane, batch_size, plain, tree)
            quality = [one.quality for one in tree.results]
            accuracy = [one.accuracy for one in quality if one.accuracy is not None]
            form = [one.format_rate for one in quality if one.format_rate is not None]
            lines.append(
                {
                    "batch": batch_size,
                    "tree": tree.name,
                    "tokens a round": _spoken(tree.length, "{:.2f}"),
                    "tokens/s": _spoken(tree.speed, "{:.1f}"),
                    "gain on off": "" if gain is None else _spoken(gain.gain, "{:+.0%}"),
                    "same text as off": "" if gain is None else f"{gain.same_outputs} of {gain.num_requests}",
                    "drafted a round": f"{_mean([one.acceptance.candidates_per_round for one in tree.results]):.1f}",
                    "peak memory, MiB": f"{max(one.memory.peak for one in tree.results) / 2**20:.0f}",
                    "exact match": f"{_mean(accuracy):.0%}" if accuracy else "",
                    "form": f"{_mean(form):.0%}" if form else "",
                    "ended": f"{_mean([one.completion_rate for one in quality]):.0%}",
                    "failed": sum(one.throughput.failed + one.throughput.timed_out for one in tree.results),
                }
            )
    frame = pandas.DataFrame(lines)
    return frame.loc[:, (frame != "").any()]


def _spoken(one: Interval, form: str) -> str:
    return f"{form.format(one.estimate)} ({form.format(one.low)} to {form.format(one.high)})"


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)
