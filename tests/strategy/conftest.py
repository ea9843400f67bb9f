"""Every test of the strategy works in a directory of its own."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _work_in_a_temporary_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
