"""The page about batches says what the code does."""

from __future__ import annotations

import doctest
from pathlib import Path


def test_every_example_on_the_page_about_batches_runs() -> None:
    """The examples of docs/batches.md give the output printed there."""
    page = Path(__file__).parents[2] / "docs" / "batches.md"
    result = doctest.testfile(str(page), module_relative=False)
    assert result.attempted >= 10
    assert result.failed == 0
