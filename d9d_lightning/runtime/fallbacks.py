"""Backward passes that the schedule wants in two parts, but that a stage can only do whole: told once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from d9d_lightning.stage.stage import PipelineStage

__all__ = ["Fallback", "FallbackNews", "describe_fallbacks"]

Fallback = tuple[str, str]
"""A stage with the names of its units, and why its backward is not split."""

_SHOWN_UNITS = 3


class FallbackNews:
    """Remembers what this rank has told."""

    def __init__(self) -> None:
        self._known: set[tuple[int, str]] = set()

    def find(self, stages: Iterable[PipelineStage]) -> list[Fallback]:
        """What the stages of one step have met for the first time.

        Numbers within a reason (how often a weight is used) vary with the batch and make it no new one.
        """
        news = []
        for stage in stages:
            for reason in sorted(stage.fallback_reasons):
                key = stage.index, re.sub(r"\d+", "", reason)
                if key not in self._known:
                    self._known.add(key)
                    news.append((_describe_stage(stage), reason))
        return news


def describe_fallbacks(found: Sequence[Fallback]) -> list[str]:
    """One sentence for each reason."""
    places: dict[str, list[str]] = {}
    for place, reason in found:
        places.setdefault(reason, []).append(place)
    return [
        f"the backward of {', '.join(where)} is computed whole where the schedule asks for input gradients first and "
        f"weight gradients later, with the same result but less to fill idle time with: {reason}"
        for reason, where in places.items()
    ]


def _describe_stage(stage: PipelineStage) -> str:
    units = stage.units
    shown = ", ".join(repr(unit) for unit in units[:_SHOWN_UNITS])
    return f"stage {stage.index} ({shown}{', ...' if len(units) > _SHOWN_UNITS else ''})"
