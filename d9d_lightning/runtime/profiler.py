"""Periodic traces of every rank, named by its place on the mesh, written without stopping training.

Of every ``period_steps`` steps the last ``active_steps`` are recorded, after ``warmup_steps`` in which the profiler
runs but keeps nothing::

    step     0     1     2       3       | 4     5     6       7       |
             wait  wait  warmup  active  | wait  wait  warmup  active  |      period 4, warmup 1, active 1
                                         step_4                        step_8

A trace is named after the number of steps that were done when it ended, so a resumed run continues the numbering.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerAction, ProfilerActivity, profile, supported_activities

from d9d_lightning.errors import PipelineConfigurationError
from d9d_lightning.runtime.trace_writer import TraceWriter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Profiler"]


class Profiler:
    """Records a few steps of every period with ``torch.profiler``.

    Each window becomes ``save_dir/step_<n>/rank-<rank>-coord-<coordinates joined by ->-trace.tar.gz``; without a mesh
    ``rank-<rank>-trace.tar.gz``, and in a single process ``trace.tar.gz``. The archive holds one Chrome trace (JSON).
    It appears under its name once it is complete.

    Args:
        save_dir: Where the traces go; created when the first one is written.
        period_steps: Steps from the end of one window to the end of the next.
        warmup_steps: Steps before each window in which the profiler is on but nothing is kept.
        active_steps: Steps of each window.
        dist_context: The mesh whose coordinates name this rank's files; None if there is no mesh.
        activities: What to record; by default all that this machine has.
        ranks: Global ranks that record and write; by default all. On the others profiling costs nothing.
        record_shapes: Also keep the shapes of operator arguments. Makes recorded steps slower.
        with_stack: Also keep source locations. Makes recorded steps much slower.
        profile_memory: Also keep allocations. torch can do that only for the threads that it follows by itself.
        profile_all_threads: Record threads that were started elsewhere, data loading and transfers among them; by
            default unless ``profile_memory`` is set.

    Raises:
        PipelineConfigurationError: The steps do not fit into the period, or memory of all threads is asked for.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        period_steps: int,
        warmup_steps: int,
        active_steps: int,
        dist_context: DeviceMesh | None = None,
        *,
        activities: Iterable[ProfilerActivity] | None = None,
        ranks: Collection[int] | None = None,
        record_shapes: bool = False,
        with_stack: bool = False,
        profile_memory: bool = False,
        profile_all_threads: bool | None = None,
    ) -> None:
        if warmup_steps < 0 or active_steps < 1 or warmup_steps + active_steps > period_steps:
            raise PipelineConfigurationError(
                f"A period of {period_steps} steps cannot hold {warmup_steps} steps of warmup and {active_steps} "
                f"active ones. Use active_steps >= 1, warmup_steps >= 0 and "
                f"period_steps >= {max(warmup_steps, 0) + max(active_steps, 1)}."
            )
        if profile_memory and profile_all_threads:
            raise PipelineConfigurationError(
                "torch records no allocations while it records all threads. Drop profile_memory=True or "
                "profile_all_threads=True."
            )
        self._save_dir = Path(save_dir)
        self._period = period_steps
        self._warmup = warmup_steps
        self._active = active_steps
        self._mesh = dist_context
        self._activities = supported_activities() if activities is None else set(activities)
        self._ranks = ranks
        self._record_shapes = record_shapes
        self._with_stack = with_stack
        self._profile_memory = profile_memory
        self._all_threads = not profile_memory if profile_all_threads is None else profile_all_threads

    @contextmanager
    def open(self, start_step: int = 0) -> Iterator[profile]:
        """Profile what runs inside; call ``step()`` on the yielded profiler after every training step.

        A window that the start falls into is recorded from there; one that the end cuts off is written if a step of it
        was finished. Traces are written by a thread of their own; the end waits for it.

        Args:
            start_step: Number of steps done before, in this run and the ones that it resumes.

        Raises:
            PipelineConfigurationError: ``start_step`` is negative.
        """
        if start_step < 0:
            raise PipelineConfigurationError(
                f"start_step is {start_step}. Give the number of steps already done, for example trainer.global_step."
            )
        window = _Window(self._period, self._warmup, self._active, start_step, is_recorded=self._records_here())
        with TraceWriter() as writer:

            def hand_over(finished: profile) -> None:
                if window.is_worth_writing(finished.step_num) and finished.profiler is not None:
                    folder = self._save_dir / f"step_{finished.step_num}"
                    writer.submit(finished.profiler, folder / f"{self._name_rank()}trace.tar.gz")
                # the writer owns it now; torch makes a new one for the next window
                finished.profiler = None

            running = profile(
                activities=self._activities,
                # torch asks for the first action while its own counter is still 0
                schedule=lambda step: window.action_at(step or start_step),
                on_trace_ready=hand_over,
                record_shapes=self._record_shapes,
                with_stack=self._with_stack,
                profile_memory=self._profile_memory,
                experimental_config=self._configure(),
            )
            running.step_num = start_step
            with running:
                try:
                    yield running
                finally:
                    window.is_closing = True

    def _configure(self) -> _ExperimentalConfig:
        # Otherwise torch builds a Python object for every event, on the training thread, and nobody reads them. Stacks
        # are written from these objects.
        trace_only = not self._with_stack
        try:
            return _ExperimentalConfig(profile_all_threads=self._all_threads, trace_only=trace_only)
        except TypeError:  # a torch that does not know trace_only
            return _ExperimentalConfig(profile_all_threads=self._all_threads)

    def _records_here(self) -> bool:
        return self._ranks is None or _global_rank() in self._ranks

    def _name_rank(self) -> str:
        coordinate = None if self._mesh is None else self._mesh.get_coordinate()
        if coordinate is not None:
            return f"rank-{_global_rank()}-coord-{'-'.join(map(str, coordinate))}-"
        return f"rank-{_global_rank()}-" if _is_distributed() else ""


@dataclass
class _Window:
    """Which steps of a run are recorded."""

    period: int
    warmup: int
    active: int
    start_step: int
    is_recorded: bool
    is_closing: bool = False

    def action_at(self, step: int) -> ProfilerAction:
        """What the profiler does during a step, counted from 0 over all resumed runs."""
        place = self._place(step)
        if not self.is_recorded or place < -self.warmup:
            return ProfilerAction.NONE
        if place < 0:
            return ProfilerAction.WARMUP
        return ProfilerAction.RECORD_AND_SAVE if place == self.active - 1 else ProfilerAction.RECORD

    def is_worth_writing(self, num_steps: int) -> bool:
        """Whether a trace that ended after ``num_steps`` holds a whole step; one that the end cut off may not."""
        return not self.is_closing or min(self._place(num_steps), num_steps - self.start_step) > 0

    def _place(self, step: int) -> int:
        """Position within the window, from 0; negative before it."""
        return step % self.period - (self.period - self.active)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized()


def _global_rank() -> int:
    return dist.get_rank() if _is_distributed() else 0
