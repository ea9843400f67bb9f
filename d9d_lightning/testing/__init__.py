"""Aids for tests, shipped so that schedules and modules of your own can be tested the same way."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d9d_lightning.testing.pipeline import LocalPipeline, LocalRun
    from d9d_lightning.testing.processes import RankOutcome, collect_outcomes, distributed, run_distributed
    from d9d_lightning.testing.schedules import ScheduleReport, check_schedule

__all__ = [
    "LocalPipeline",
    "LocalRun",
    "RankOutcome",
    "ScheduleReport",
    "check_schedule",
    "collect_outcomes",
    "distributed",
    "run_distributed",
]

# One line per public name: the file that defines it.
_LAZY = {
    "LocalPipeline": "pipeline",
    "LocalRun": "pipeline",
    "RankOutcome": "processes",
    "ScheduleReport": "schedules",
    "check_schedule": "schedules",
    "collect_outcomes": "processes",
    "distributed": "processes",
    "run_distributed": "processes",
}


def __getattr__(name: str) -> Any:
    # The schedule checks must not pay for loading torch, nor the process aids for loading the replay engine.
    if name in _LAZY:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(sorted(__all__))}")
