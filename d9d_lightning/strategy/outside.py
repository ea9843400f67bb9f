"""Calls of the module outside of its steps: a hook or a callback that samples, generates, or looks at an output.

There is no schedule for them. Every rank runs the call, each unit on its owner, and outputs go to all ranks. All ranks
must take part; a call under ``if trainer.is_global_zero:`` is an error, not a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from typing import Any

from torch import Tensor

from d9d_lightning.errors import PlaceholderReadError
from d9d_lightning.partition.placeholder import is_placeholder, told_of_lost_writes
from d9d_lightning.partition.user_code import describe_user_line
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
        self._engine = engine
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
        guarded = told_of_lost_writes(self._refuse_lost_write)
        outside, policy = self._interceptor.outside_of_steps(), self._interceptor.policy(self._policy)
        with guarded, self._interceptor.installed(), outside, policy:
            yield

    def _refuse_lost_write(self, target: Tensor, origin: str) -> None:
        memory = target.untyped_storage()._cdata
        buffers = {name: b for name, b in self._engine.module.named_buffers() if self._saves_buffer(name)}
        for name, own in {**self._engine.owned_parameters, **buffers}.items():
            if not is_placeholder(own) and own.untyped_storage()._cdata == memory:
                raise PlaceholderReadError(
                    f"{describe_user_line()} writes into {name!r}, which this rank keeps, what it computed from "
                    f"{origin!r}, which lives on another rank: the value is not known here, and the write would be "
                    "lost. Expected: tensors of one rank. A submodule made by copy.deepcopy is placed with what it "
                    "was made from. Otherwise put these lines, on all ranks, within "
                    "`with self.trainer.strategy.whole_module():`."
                )

    def _saves_buffer(self, name: str) -> bool:
        return self._engine.buffer_owners.get(name) == self._engine.rank

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
