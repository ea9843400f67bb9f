"""States of torchmetrics objects as they were before a batch, for a batch that has to run again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torchmetrics import Metric

__all__ = ["MetricBackup"]

_BOOKKEEPING = ("_update_count", "_computed", "_forward_cache")


class MetricBackup:
    """Taken by the rank that updates metrics; empty elsewhere.

    Args:
        metrics: What the step may update.
    """

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._saved = [(metric, _states(metric)) for metric in metrics]

    def restore(self) -> None:
        """Take back every update since."""
        for metric, states in self._saved:
            for name, value in states.items():
                setattr(metric, name, _copied(value))


def _states(metric: Metric) -> dict[str, Any]:
    names = (*metric._defaults, *_BOOKKEEPING)
    return {name: _copied(getattr(metric, name)) for name in names if hasattr(metric, name)}


def _copied(value: Any) -> Any:
    # updates add to a state tensor in place, and append to a list of tensors that stay what they are
    if isinstance(value, Tensor):
        return value.detach().clone()
    return list(value) if isinstance(value, list) else value
