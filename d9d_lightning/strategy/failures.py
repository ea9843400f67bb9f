"""One failure watch for each run: whatever goes wrong on one rank, every rank raises or ends within seconds."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch.utilities.exceptions import SIGTERMException

from d9d_lightning.runtime.watch import FailureWatch, WatchLimits
from d9d_lightning.runtime.watch_store import SharedStore
from d9d_lightning.runtime.whereabouts import Doing, Outside
from d9d_lightning.strategy.meeting import Meeting
from d9d_lightning.strategy.options import StrategyOptions
from d9d_lightning.strategy.world import World, next_number

__all__ = ["RunWatch", "started_by_us"]


def started_by_us(environment: ClusterEnvironment | None) -> bool:
    """Whether this process was started by a launcher of the strategy, and so must not outlive its parent."""
    if not isinstance(environment, LightningEnvironment):
        return False
    return environment.local_rank() > 0 or multiprocessing.parent_process() is not None


class RunWatch:
    """Watches one run of a trainer; does nothing where there is one process.

    Args:
        world: The processes.
        options: ``timeout`` is how long one batch may take.
        environment: How this process was started.
    """

    def __init__(self, world: World, options: StrategyOptions, environment: ClusterEnvironment | None) -> None:
        self._watch: FailureWatch | None = None
        self._end: Meeting | None = None
        self._step: Doing | None = None
        self._place: tuple[BaseException, str] | None = None
        if world.axes.world == 1:
            return
        self._watch = FailureWatch(
            cast(SharedStore, dist.distributed_c10d._get_default_store()),
            dist.get_rank(),
            world.axes.world,
            run=(run := next_number(world, "watch")),
            limits=WatchLimits(action=options.timeout.total_seconds()),
            follow_parent=started_by_us(environment),
            idle=Outside(),
        )
        self._end = Meeting(world.axes.world, f"end{run}")
        self._watch.start()
        if world.groups is not None:
            # a rank may die within the first second, and take the store along
            dist.barrier(group=world.groups.world_control)
            self._watch.hear_others()

    @contextmanager
    def action(self, name: str) -> Iterator[None]:
        """Around one batch; the name is shown where it fails or hangs outside of any action of the program."""
        if self._watch is None:
            yield
            return
        self._step = Doing(name)
        self._watch.enter(self._step)
        try:
            yield
        except BaseException as error:
            self._place = (error, self._watch.where)
            raise
        finally:
            self._step = None
            self._watch.leave()

    def enter(self, action: object) -> None:
        """An action of the program begins."""
        if self._watch is not None:
            self._watch.enter(Doing(action))

    def leave(self) -> None:
        """It ended; what is left of the batch runs on."""
        if self._watch is not None:
            self._watch.leave()
            if self._step is not None:
                self._watch.enter(self._step)

    def report(self, error: BaseException) -> None:
        """The same as :meth:`publish`, asked for by the pipeline."""
        self.publish(error)

    def publish(self, error: BaseException) -> None:
        """Tell the other ranks. Those that do not raise by themselves end after a few seconds, with this error."""
        if self._watch is not None and not isinstance(error, SIGTERMException):  # that one is raised by all at once
            known = self._place is not None and self._place[0] is error
            self._watch.publish(error, self._place[1] if known and self._place is not None else "")
            self._place = None

    def close(self, together: bool = False) -> None:
        """End of the run on this rank.

        Args:
            together: It went well here: wait until it did on all ranks. If one fails, its error ends this one.
        """
        if together and self._end is not None:
            self._end.attend("the end of the run", seconds=math.inf)
        self._place = None
        if self._watch is not None:
            self._watch.close()
            self._watch = None
