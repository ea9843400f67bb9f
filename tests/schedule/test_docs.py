"""The page on schedules."""

from __future__ import annotations

import re
from pathlib import Path

from d9d_lightning.schedule import SCHEDULES

PAGE = Path(__file__).resolve().parents[2] / "docs" / "schedules.md"


def test_the_python_blocks_of_the_page_run() -> None:
    """Every Python block on the page runs as it stands."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {"__name__": "docs"})


def test_the_page_knows_every_schedule_and_its_pictures_exist() -> None:
    """Each registered name stands on the page, and each picture that it shows is there."""
    text = PAGE.read_text(encoding="utf-8")
    for name in SCHEDULES:
        assert f"`{name}`" in text
    pictures = re.findall(r"\]\((pictures/.*?)\)", text)
    assert len(pictures) >= 10
    for picture in pictures:
        assert (PAGE.parent / picture).is_file()
