"""What docs/reliability.md says is kept by tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_page_names_exists() -> None:
    """Each promise of the page points to a test of this repository."""
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "reliability.md").read_text()))
    defined = {
        name for path in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())
    }
    assert len(named) > 30
    assert named - defined == set()


def test_every_row_of_the_list_has_a_test() -> None:
    """No row of reported faults is left without a test."""
    page = (ROOT / "docs" / "reliability.md").read_text()
    rows = re.findall(r"^\| (\d+) \|.*\| ([^|]+) \|$", page, re.MULTILINE)
    assert len(rows) == 39
    assert [number for number, tests in rows if "test_" not in tests] == []
