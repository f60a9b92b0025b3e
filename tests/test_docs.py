"""What the documents name exists."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_test_that_a_document_names_exists() -> None:
    defined = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    named = {
        name for path in (ROOT / "docs").glob("*.md") for name in re.findall(r"`(test_\w+)`", path.read_text("utf-8"))
    }
    assert len(named) > 20
    assert named <= defined, sorted(named - defined)
