"""Calls of the module outside of its steps: a hook or a callback that samples, generates, or looks at an output.

There is no schedule for them. Every rank runs the call, each unit on its owner, and outputs go to all ranks. All ranks
must take part; a call under ``if trainer.is_global_zero:`` is an error, not a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

from d9d_lightning.runtime.groups import PipelineGroups
from d9d_lightning.runtime.pipeline import Pipeline
from d9d_lightning.stage.lockstep import LockstepExchange, LockstepPolicy
from d9d_lightning.strategy.meeting import Meeting
from d9d_lightning.values import Placement

__all__ = ["Around", "OutsideCalls", "run_around"]

Around = Callable[[], AbstractContextManager[None]]


class OutsideCalls:
    """Runs units on their owners while a hook runs.

    Args:
        engine: The pipeline.
        groups: Its groups.
        placement: Stage of every unit.
        meeting: Where ranks meet before the first call of a hook.
    """

    def __init__(self, engine: Pipeline, groups: PipelineGroups, placement: Placement, meeting: Meeting) -> None:
        self._interceptor = engine.planner.interceptor
        self._groups = groups
        self._meeting = meeting
        self._met = False
        exchange = LockstepExchange(placement, engine.stage_to_rank, engine.rank, self._share)
        self._policy = LockstepPolicy(self._interceptor, exchange, engine.is_loss_owner)

    @contextmanager
    def allowed(self) -> Iterator[None]:
        """Around a hook; costs a few attribute writes a unit."""
        self._met = False
        with self._interceptor.installed(), self._interceptor.policy(self._policy):
            yield

    def _share(self, value: Any, source: int) -> Any:
        if not self._met:
            self._meeting.attend("a module, outside of its steps,")
            self._met = True
        return self._groups.broadcast(value, source, lockstep=True)


def run_around(hook: Callable[..., Any], around: Around) -> Callable[..., Any]:
    """The hook, inside a context."""

    @wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        with around():
            return hook(*args, **kwargs)

    return run
