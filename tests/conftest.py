"""Settings of the whole suite."""

from __future__ import annotations

import os

import pytest

# Several processes share few cores: more threads than cores make every test slower, and sums less repeatable.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """``-m full`` means everything, not only what the default suite leaves out."""
    if config.option.markexpr == "full":
        config.option.markexpr = ""
