"""Pictures of a lane: each takes a lane and a theme, and is a figure, or None where nothing was measured for it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from compressed_spec.measure.bootstrap import Interval
from compressed_spec.measure.compare import Comparison, Measure, best_of_each, equal_budget
from compressed_spec.measure.record import Latency, StageSeconds
from compressed_spec.measure.reporting.lanes import LENGTH, SPEED, Lane, Tree, value
from compressed_spec.measure.reporting.tables import gain_frames
from compressed_spec.measure.reporting.theme import WIDTH, Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STAGES = ("prefill", "draft", "verify", "sample", "commit", "other")
_TIMES = {"ttft": "first token", "tpot": "each token", "itl": "between chunks", "e2el": "whole answer"}
_PERCENTILES = (("median", "o"), ("p95", "^"), ("p99", "s"))


def length_by_nodes(lane: Lane, theme: Theme) -> "Figure | None":
    """Accepted length against D, at the smallest batch size (it does not depend on it)."""
    return _by_nodes(lane, theme, LENGTH, [lane.first], "tokens a round")


def speed_by_nodes(lane: Lane, theme: Theme) -> "Figure | None":
    """Tokens a second against D, a panel a batch size, of at most four."""
    return _by_nodes(lane, theme, SPEED, lane.some(4), "tokens/s")


def _by_nodes(lane: Lane, theme: Theme, measure: Measure, batch_sizes: Sequence[int], label: str) -> "Figure | None":
    curves = {
        batch_size: {chain: lane.by_nodes(batch_size, measure, chain=chain) for chain in (True, False)}
        for batch_size in batch_sizes
    }
    curves = {batch_size: both for batch_size, both in curves.items() if both[True] or both[False]}
    if not curves:
        return None
    figure = _figure(0.9 + 1.9 * len(curves) if len(curves) > 1 else 3.1)
    rows = figure.subplots(len(curves), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (batch_size, both) in zip(rows, curves.items(), strict=True):
        for chain, name, color, marker in ((True, "chain", theme.chain, "o"), (False, "tree", theme.tree, "s")):
            _curve(axes, {nodes: value(tree, measure) for nodes, tree in both[chain].items()}, name, color, marker)
        plain = lane.plain(batch_size)
        if plain is not None:
            off = value(plain, measure)
            axes.axhspan(off.low, off.high, color=theme.off, alpha=0.2, linewidth=0)
            axes.axhline(off.estimate, color=theme.off, linestyle="--", linewidth=1.4, label="off")
        axes.set_ylabel(label)
        axes.set_title(f"batch {batch_size}")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.margins(y=0.12)
    rows[-1].set_xlabel("D: nodes verified a round, root counted")
    _legend(figure, rows[0])
    return figure


def _curve(axes: "Axes", points: Mapping[int, Interval], name: str, color: str, marker: str) -> None:
    if not points:
        return
    nodes = list(points)
    low, high = [one.low for one in points.values()], [one.high for one in points.values()]
    if len(nodes) > 1:
        axes.fill_between(nodes, low, high, color=color, alpha=0.2, linewidth=0)
    else:
        axes.vlines(nodes, low, high, color=color, alpha=0.4, linewidth=3)
    axes.plot(nodes, [one.estimate for one in points.values()], marker=marker, color=color, label=name, markersize=4.5)


def gain_map(lane: Lane, theme: Theme) -> "Figure | None":
    """Gain of the fastest tree or chain of each D over plain decoding, by batch size; ~ where it may be none."""
    from matplotlib.colors import TwoSlopeNorm

    frames = gain_frames(lane)
    if frames is None:
        return None
    gain, uncertain = frames
    gains, marks = gain.to_numpy(dtype=np.float64), uncertain.to_numpy(dtype=np.bool_)
    figure = _figure(1.3 + 0.42 * len(gains))
    axes = figure.subplots()
    most = max(0.05, float(np.nanmax(np.abs(gains))))
    norm = TwoSlopeNorm(0.0, vmin=-min(most, 1.0), vmax=most)  # nothing loses more than everything
    image = axes.imshow(gains, cmap=theme.heat, norm=norm, aspect="auto")
    for (i, j), number in np.ndenumerate(gains):
        if not np.isnan(number):
            # Both ends of the map are dark, its middle is light: whatever the theme.
            color = "#ffffff" if abs(float(norm(number)) - 0.5) > 0.3 else "#1f2328"
            text = f"{'~' if marks[i, j] else ''}{100 * number:+.0f}"
            axes.text(j, i, text, ha="center", va="center", color=color, fontsize=9)
    axes.set_xticks(range(len(gain.columns)), [str(nodes) for nodes in gain.columns])
    axes.set_yticks(range(len(gain)), [str(batch_size) for batch_size in gain.index])
    axes.set_xlabel("D: nodes verified a round, root counted")
    axes.set_ylabel("batch size")
    axes.grid(False)
    axes.set_facecolor(theme.faint)
    for spine in axes.spines.values():
        spine.set_visible(False)
    bar = figure.colorbar(image, ax=axes, format=lambda gain, _: f"{100 * gain:+.0f} %")
    bar.outline.set_visible(False)
    return figure


def acceptance_by_position(lane: Lane, theme: Theme) -> "Figure | None":
    """How many rounds accepted a draft at each depth, of the fastest chain and tree at the smallest batch size."""
    batch_size = lane.first
    shown = [(one, color) for one, color in _best(lane, batch_size, theme) if one.shape is not None]
    rates = [(one, color, _rates(one)) for one, color in shown]
    rates = [(one, color, rate) for one, color, rate in rates if len(rate)]
    if not rates:
        return None
    figure = _figure(3.0)
    axes = figure.subplots()
    width = 0.8 / len(rates)
    for i, (one, color, rate) in enumerate(rates):
        places = np.arange(1, len(rate) + 1) + (i - (len(rates) - 1) / 2) * width
        axes.bar(places, 100 * rate, width * 0.94, color=color, label=one.name)
    deepest = max(len(rate) for _, _, rate in rates)
    axes.set_xticks(range(1, deepest + 1))
    axes.set_ylim(0, 100)
    axes.set_xlabel("depth of the draft")
    axes.set_ylabel("% of rounds that accept it")
    axes.grid(axis="x", visible=False)
    _legend(figure, axes)
    return figure


def _rates(tree: Tree) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    counts = [one.acceptance.num_accepted_tokens_per_pos for one in tree.results]
    depth = max(map(len, counts))
    totals = np.sum([np.pad(np.asarray(count, dtype=np.float64), (0, depth - len(count))) for count in counts], axis=0)
    return np.asarray(totals / max(sum(one.acceptance.num_rounds for one in tree.results), 1))


def stage_times(lane: Lane, theme: Theme) -> "Figure | None":
    """Milliseconds an output token by stage: off, the fastest chain and the fastest tree, at each batch size."""
    bars = [(batch_size, one) for batch_size in lane.trees for one, _ in _best(lane, batch_size, theme)]
    bars = [(batch_size, one) for batch_size, one in bars if _output_tokens(one)]
    if not bars:
        return None
    figure = _figure(1.3 + 0.27 * len(bars))
    axes = figure.subplots()
    places = _places([batch_size for batch_size, _ in bars])
    left = np.zeros(len(bars))
    for stage, color in zip(_STAGES, theme.stages, strict=True):
        lengths = np.array([1e3 * _seconds(one, stage) / _output_tokens(one) for _, one in bars])
        axes.barh(places, lengths, 0.8, left=left, color=color, label=stage, edgecolor=theme.paper, linewidth=0.5)
        left += lengths
    axes.set_yticks(places, [f"batch {batch_size}  {one.name}" for batch_size, one in bars])
    axes.set_ylim(places[-1] + 0.8, -0.8)
    axes.set_xlabel("milliseconds an output token")
    axes.grid(axis="y", visible=False)
    _legend(figure, axes, columns=3)
    return figure


def _places(batch_sizes: Sequence[int]) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Heights of rows, one under the other, with a gap between batch sizes."""
    return np.cumsum([0.0] + [1.0 if one == other else 1.6 for one, other in pairwise(batch_sizes)])


def _output_tokens(tree: Tree) -> int:
    return sum(one.throughput.total_output_tokens for one in tree.results)


def _seconds(tree: Tree, stage: str) -> float:
    assert stage in {one.name for one in fields(StageSeconds)}
    return sum(float(getattr(one.stages, stage)) for one in tree.results)


def latencies(lane: Lane, theme: Theme) -> "Figure | None":
    """Percentiles of four waiting times against batch size: off, the fastest chain and the fastest tree."""
    kinds = ("off", "chain", "tree")
    batch_sizes = list(lane.trees)
    figure = _figure(4.6)
    panels = figure.subplots(2, 2).flatten()
    drawn = False
    for axes, (key, title) in zip(panels, _TIMES.items(), strict=True):
        for i, batch_size in enumerate(batch_sizes):
            for kind, one, color in _kinds(lane, batch_size, theme):
                place = i + 0.24 * (kinds.index(kind) - 1)
                points = [(_latency(one, f"{name}_{key}_ms"), marker) for name, marker in _PERCENTILES]
                known = [(number, marker) for number, marker in points if number is not None]
                if known:
                    drawn = True
                    numbers = [number for number, _ in known]
                    axes.vlines(place, min(numbers), max(numbers), color=color, linewidth=1.4)
                for number, marker in known:
                    face = color if marker == "o" else theme.paper
                    axes.plot(place, number, marker, color=color, markerfacecolor=face, markersize=4.5)
        axes.set_title(title)
        axes.set_xticks(range(len(batch_sizes)), [str(batch_size) for batch_size in batch_sizes])
        axes.set_xlim(-0.6, len(batch_sizes) - 0.4)
        axes.set_ylim(bottom=0)
        axes.grid(axis="x", visible=False)
    for axes in panels[2:]:
        axes.set_xlabel("batch size")
    for axes in panels[::2]:
        axes.set_ylabel("milliseconds")
    _latency_legend(figure, theme)
    return figure if drawn else None


def _latency_legend(figure: "Figure", theme: Theme) -> None:
    from matplotlib.lines import Line2D

    ways = [("off", theme.off), ("fastest chain", theme.chain), ("fastest tree", theme.tree)]
    handles = [Line2D([], [], color=color, label=name) for name, color in ways]
    for name, marker in _PERCENTILES:
        face = theme.ink if marker == "o" else theme.paper
        handles.append(Line2D([], [], color=theme.ink, marker=marker, markerfacecolor=face, linestyle="", label=name))
    figure.legend(handles=handles, loc="outside upper center", ncols=2)


def _latency(tree: Tree, name: str) -> float | None:
    """The mean of the repeats' percentiles."""
    assert name in {one.name for one in fields(Latency)}
    numbers = [getattr(one.latency, name) for one in tree.results]
    known = [float(number) for number in numbers if number is not None]
    return sum(known) / len(known) if known else None


def chain_against_tree(lane: Lane, theme: Theme) -> "Figure | None":
    """Gain of trees on chains: at equal D, and the best of each at any, at up to three batch sizes."""
    rows = comparison_rows(lane, lane.some(3))
    if not rows:
        return None
    figure = _figure(1.5 + 0.27 * len(rows))
    panels = figure.subplots(1, 2, sharey=True)
    places = _places([batch_size for batch_size, _, _ in rows])
    for axes, measure, title in zip(panels, (LENGTH, SPEED), ("tokens a round", "tokens/s"), strict=True):
        for place, (_, _, by_measure) in zip(places, rows, strict=True):
            one = by_measure.get(measure)
            if one is None:
                continue
            gain = one.gain
            sure = gain.low > 0 or gain.high < 0
            color = theme.tree if gain.low > 0 else theme.chain if gain.high < 0 else theme.off
            axes.plot([100 * gain.low, 100 * gain.high], [place, place], color=color, linewidth=2)
            axes.plot(
                100 * gain.estimate,
                place,
                "o",
                color=color,
                markerfacecolor=color if sure else theme.paper,
                markersize=5,
            )
        axes.axvline(0, color=theme.ink, linewidth=1)
        axes.set_title(title)
        axes.set_xlabel("gain of tree, %")
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.12)
    panels[0].set_yticks(places, [f"batch {batch_size}, {budget}" for batch_size, budget, _ in rows])
    panels[0].set_ylim(places[-1] + 0.8, -0.8)
    return figure


def comparison_rows(lane: Lane, batch_sizes: Iterable[int]) -> list[tuple[int, str, dict[Measure, Comparison]]]:
    """Batch size, budget and comparisons: at each D the fastest tree's with the chain, then the best of each."""
    rows = []
    for batch_size in batch_sizes:
        trees = lane.trees[batch_size]
        records = [record for one in trees for record in one.records]
        pairs = {measure: equal_budget(records, measure) for measure in (LENGTH, SPEED)}
        best = {measure: best_of_each(records, measure) for measure in (LENGTH, SPEED)}
        for nodes, tree in lane.by_nodes(batch_size, SPEED, chain=False).items():
            found = {
                measure: one
                for measure, some in pairs.items()
                for one in some
                if one.num_nodes == nodes and one.second == tree.name
            }
            if found:
                rows.append((batch_size, f"D {nodes}", found))
        any_budget = {measure: some[0] for measure, some in best.items() if some}
        if any_budget:
            rows.append((batch_size, "best", any_budget))
    return rows


def _kinds(lane: Lane, batch_size: int, theme: Theme) -> list[tuple[str, Tree, str]]:
    """Plain decoding, the fastest chain and the fastest tree, where they were measured."""
    found = [
        ("off", lane.plain(batch_size), theme.off),
        ("chain", lane.best(batch_size, chain=True), theme.chain),
        ("tree", lane.best(batch_size, chain=False), theme.tree),
    ]
    return [(kind, one, color) for kind, one, color in found if one is not None]


def _best(lane: Lane, batch_size: int, theme: Theme) -> list[tuple[Tree, str]]:
    return [(one, color) for _, one, color in _kinds(lane, batch_size, theme)]


def _figure(height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def _legend(figure: "Figure", axes: "Axes", columns: int = 4) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=columns)
