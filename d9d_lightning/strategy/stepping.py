"""All ranks let their optimizer step after a batch, or none of them does.

A module may override ``optimizer_step`` and skip the step. Where it decides by what one rank sees, a part of the module
would be left behind without a word. Nothing is sent unless the module has such an override.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.distributed import ProcessGroup

from d9d_lightning.errors import PipelineError
from d9d_lightning.runtime.groups import maximum_over
from d9d_lightning.strategy.disagreement import RanksDisagreeError

__all__ = ["ClosureSkippedError", "StepAgreement", "skipped_closure"]

_ADVICE = (
    "Let all ranks decide alike: type `skip = self.trainer.strategy.reduce_boolean_decision(skip, all=False)` before "
    "the `if skip:`; and to skip a step call `optimizer_closure()` without `optimizer.step`, on every rank."
)


class ClosureSkippedError(PipelineError, MisconfigurationException):
    """``optimizer_step`` of the module has returned without running its closure; also Lightning's own class."""


def skipped_closure(rank: int, batch_idx: int) -> ClosureSkippedError:
    """The error of a rank that would leave the others alone in a batch."""
    return ClosureSkippedError(
        f"rank {rank} skipped its closure: `optimizer_step` of the module returned in batch {batch_idx} without "
        "calling it. Expected: the closure runs once on every rank, since it holds the passes that the other "
        f"ranks wait for. {_ADVICE}"
    )


class StepAgreement:
    """Compares between the ranks whether the optimizer steps.

    Args:
        group: A gloo group of all processes; None where one process is alone.
        is_needed: Whether the module can skip a step; the same on all ranks.
    """

    def __init__(self, group: ProcessGroup | None, is_needed: Callable[[], bool]) -> None:
        self._group = group
        self._is_needed = is_needed
        self._stepped = False

    def step(self) -> None:
        """Before the hooks of a step of this rank's optimizer; collective.

        Raises:
            RanksDisagreeError: Another rank skips it.
        """
        self._stepped = True
        self._compare(True)

    def end(self) -> None:
        """After ``optimizer_step``; collective where it made no step.

        Raises:
            RanksDisagreeError: Another rank made one.
        """
        stepped, self._stepped = self._stepped, False
        if not stepped:
            self._compare(False)

    def _compare(self, steps: bool) -> None:
        if self._group is None or not self._is_needed():
            return
        if sum(maximum_over([int(steps), int(not steps)], self._group)) < 2:
            return
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, steps, group=self._group)
        stepping = [rank for rank, one in enumerate(found) if one]
        skipping = [rank for rank, one in enumerate(found) if not one]
        raise RanksDisagreeError(
            f"`optimizer_step` of the module skipped the step on ranks {skipping} and made it on ranks {stepping}. "
            f"Every rank has a part of the module, and those parts would no longer belong together. {_ADVICE}"
        )
