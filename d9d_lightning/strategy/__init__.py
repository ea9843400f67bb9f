"""The only package that imports lightning.

Reading order: ``strategy`` (the hooks, in the order Lightning calls them) -> ``run`` -> ``loop`` ->
``training`` -> ``losses`` -> ``logbook`` -> ``evaluation`` -> ``checkpoint``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d9d_lightning.strategy.norms import grad_norm
    from d9d_lightning.strategy.profiling import PeriodicTraces, PipelineProfiler
    from d9d_lightning.strategy.strategy import D9DStrategy
    from d9d_lightning.strategy.timeline import StepTimeline

__all__ = ["D9DStrategy", "PeriodicTraces", "PipelineProfiler", "StepTimeline", "grad_norm"]

# One line per public name: the file that defines it. The registry of names lives below this package and must not load
# lightning, so nothing is loaded before it is asked for.
_LAZY = {
    "D9DStrategy": "strategy",
    "PeriodicTraces": "profiling",
    "PipelineProfiler": "profiling",
    "StepTimeline": "timeline",
    "grad_norm": "norms",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"d9d_lightning.strategy.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'd9d_lightning.strategy' has no attribute {name!r}; it has {', '.join(__all__)}")
