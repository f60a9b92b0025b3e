"""Which pictures a lane has, and what is said of each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compressed_spec.measure.reporting import charts
from compressed_spec.measure.reporting.lanes import Lane
from compressed_spec.measure.reporting.theme import Theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of picture: its file's stem, heading and caption, and who draws it."""

    stem: str
    title: str
    caption: str
    draw: Callable[[Lane, Theme], "Figure | None"]


KINDS = (
    Kind(
        stem="length",
        title="Accepted length",
        caption="Tokens a round, bonus counted, against nodes verified. Bands: 95 % intervals. Of several trees of a D "
        "the one that is best here.",
        draw=charts.length_by_nodes,
    ),
    Kind(
        stem="speed",
        title="Speed",
        caption="Output tokens a second of the whole batch, without prefill. Bands: 95 % intervals; dashed: off.",
        draw=charts.speed_by_nodes,
    ),
    Kind(
        stem="gain",
        title="Gain on plain decoding",
        caption="Tokens/s of the fastest chain or tree of each D against off, in %. ~ where the interval holds 0.",
        draw=charts.gain_map,
    ),
    Kind(
        stem="versus",
        title="Chain against tree",
        caption="Gain of the tree over the chain, 95 % intervals: orange where the tree is better, blue where the "
        "chain is, hollow where neither is shown.",
        draw=charts.chain_against_tree,
    ),
    Kind(
        stem="positions",
        title="Acceptance by position",
        caption="Share of all rounds that accepted a draft at each depth (unconditional), smallest batch, fastest "
        "chain and tree.",
        draw=charts.acceptance_by_position,
    ),
    Kind(
        stem="stages",
        title="Where the time goes",
        caption="Wall time by stage over output tokens: speculation off, the fastest chain, the fastest tree.",
        draw=charts.stage_times,
    ),
    Kind(
        stem="latency",
        title="Latency",
        caption="Median, 95th and 99th percentile over requests (over chunks, between chunks); a chunk holds all "
        "tokens of a round.",
        draw=charts.latencies,
    ),
)
