"""From results files to a page and its pictures."""

import base64
import importlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compressed_spec.measure.reporting.lanes import Lane, lanes
from compressed_spec.measure.reporting.page import comparison_table, render_page
from compressed_spec.measure.reporting.pictures import KINDS, Kind
from compressed_spec.measure.reporting.recommend import advise
from compressed_spec.measure.reporting.selection import read_all
from compressed_spec.measure.reporting.tables import point_frame
from compressed_spec.measure.reporting.theme import DARK, LIGHT, Theme, png, styled

PAGE = "report.html"
_NEEDED = ("pandas", "matplotlib")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was written. sentences: the recommendation, one a load."""

    page: Path
    pictures: tuple[Path, ...]
    sentences: tuple[str, ...]


def write_report(paths: Sequence[str], output: str) -> Report:
    """Write `report.html`, which needs no other file, and its pictures as PNGs into a folder, made if it is not there.

    Raises ValueError without pandas and matplotlib, for results that `read_all` refuses, or for a folder that cannot
    be written.
    """
    _require_libraries()
    records = read_all([Path(path) for path in paths])
    advices, found = advise(records), lanes(records)
    if not found:
        raise ValueError("No point of these results finished a request in every repeat, so there is nothing to draw.")
    folder = Path(output)
    pictures: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        sections = [_section(lane, _slug(i, lane, found), folder, pictures, found) for i, lane in enumerate(found)]
        page = folder / PAGE
        page.write_text(render_page(records, advices, sections), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"The report cannot be written to {output} ({error.strerror}): name a folder.") from error
    return Report(page=page, pictures=tuple(pictures), sentences=tuple(advice.sentence for advice in advices))


def _require_libraries() -> None:
    for name in _NEEDED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ValueError(
                f"A report needs {name}, which is not installed: pip install 'compressed-spec[report]'."
            ) from error


def _section(lane: Lane, slug: str, folder: Path, pictures: list[Path], found: Sequence[Lane]) -> dict[str, object]:
    title = _title(lane, found)
    shown = []
    for kind in KINDS:
        drawn = [_draw(kind, lane, theme) for theme in (LIGHT, DARK)]
        if drawn[0] is None or drawn[1] is None:
            continue
        path = folder / f"{slug}-{kind.stem}.png"
        path.write_bytes(drawn[0])
        pictures.append(path)
        light, dark = (base64.b64encode(data).decode() for data in (drawn[0], drawn[1]))
        shown.append(
            {
                "title": kind.title,
                "alt": f"{kind.title}: {title}",
                "caption": kind.caption,
                "light": light,
                "dark": dark,
            }
        )
    return {
        "title": title,
        "pictures": shown,
        "comparisons": comparison_table(lane),
        "points": point_frame(lane).to_html(index=False, border=0),
    }


def _draw(kind: Kind, lane: Lane, theme: Theme) -> bytes | None:
    with styled(theme):
        figure = kind.draw(lane, theme)
        return None if figure is None else png(figure)


def _slug(place: int, lane: Lane, found: Sequence[Lane]) -> str:
    words = [lane.dataset, lane.drafter] if len({one.drafter for one in found}) > 1 else [lane.dataset]
    name = re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-") or "results"
    alike = [re.sub(r"[^a-z0-9]+", "-", one.dataset.lower()) for one in found]
    return name if len(set(alike)) == len(found) else f"{place + 1}-{name}"


def _title(lane: Lane, found: Sequence[Lane]) -> str:
    parts = [lane.dataset]
    if len({one.drafter for one in found}) > 1:
        parts.append(lane.drafter)
    if len({one.load for one in found}) > 1:
        parts.append(str(lane.load))
    return ", ".join(parts)
