"""`compressed-spec report`: a sweep's results as a page."""

import json
from dataclasses import dataclass
from typing import Annotated

import tyro

from compressed_spec.measure.reporting.report import write_report


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCommand:
    """Write a page that needs no other file, its pictures, and one recommendation, from results of `sweep`."""

    results: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RESULTS...")]
    """Results files of one machine and setup."""
    output: str = "report"
    """Folder to write to."""
    json: bool = False
    """Print one JSON object only."""

    def run(self) -> None:
        """Write and say where. Raises ValueError for a fault of the user's."""
        if not self.results:
            raise ValueError("No results: name a file that `compressed-spec sweep` has written.")
        report = write_report(self.results, self.output)
        if self.json:
            pictures = [str(path) for path in report.pictures]
            print(json.dumps({"page": str(report.page), "pictures": pictures, "recommendation": report.sentences}))
            return
        for sentence in report.sentences:
            print(sentence)
        print(f"{report.page} and {len(report.pictures)} pictures beside it")
