"""How pictures look: readable on a phone, by the colour-blind, on white and on black."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 4.6  # inches: a phone's width loses little of it
DPI = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Colours (Okabe and Ito's, which the colour-blind can tell apart, lighter on black).

    off, chain, tree: the three ways to decode. stages: in the order of a round. heat: colour map from loss to gain.
    """

    name: str
    paper: str
    ink: str
    faint: str
    off: str
    chain: str
    tree: str
    stages: tuple[str, ...]
    heat: str


LIGHT = Theme(
    name="light",
    paper="#ffffff",
    ink="#1f2328",
    faint="#d0d7de",
    off="#6e7781",
    chain="#0072b2",
    tree="#d55e00",
    stages=("#999999", "#e69f00", "#0072b2", "#009e73", "#cc79a7", "#d9d9d9"),
    heat="PuOr_r",
)
DARK = Theme(
    name="dark",
    paper="#12161c",
    ink="#e6edf3",
    faint="#3a424d",
    off="#a0a8b2",
    chain="#56b4e9",
    tree="#f28e4b",
    stages=("#8b949e", "#f0b429", "#56b4e9", "#2fbf93", "#dd9bc0", "#4d5561"),
    heat="PuOr_r",
)


@contextmanager
def styled(theme: Theme) -> Iterator[None]:
    """matplotlib's defaults while figures are made."""
    import matplotlib

    settings = {
        "figure.facecolor": theme.paper,
        "savefig.facecolor": theme.paper,
        "axes.facecolor": theme.paper,
        "axes.edgecolor": theme.ink,
        "axes.labelcolor": theme.ink,
        "axes.titlecolor": theme.ink,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": theme.faint,
        "grid.linewidth": 0.6,
        "text.color": theme.ink,
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
        "font.size": 9.5,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "lines.linewidth": 1.8,
        "figure.dpi": DPI,
    }
    with matplotlib.rc_context(settings):
        yield


def png(figure: "Figure") -> bytes:
    """A figure's picture in 256 colours, a third of the bytes; the same ones whenever it is drawn."""
    from PIL import Image

    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", metadata={"Software": None})
    Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(small, format="png", optimize=True)
    return small.getvalue()
