"""Periodic traces of a fit: ``Trainer(profiler=PipelineProfiler(...))``, or the callback ``PeriodicTraces``.

Both drive :class:`d9d_lightning.runtime.Profiler`. A step is an optimizer step, with all of its accumulated batches,
counted as ``trainer.global_step`` counts, so a resumed fit continues the numbering.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.profilers import Profiler as LightningProfiler
from torch.profiler import profile

from d9d_lightning.runtime.profiler import Profiler

__all__ = ["PeriodicTraces", "PipelineProfiler"]

BATCH = "run_training_batch"
"""What Lightning calls the part of its loop that computes one batch."""


@dataclass(frozen=True)
class _Settings:
    """Arguments of :class:`Profiler` that do not depend on the run."""

    save_dir: str | os.PathLike[str] | None
    period_steps: int
    warmup_steps: int
    active_steps: int
    ranks: Collection[int] | None
    record_shapes: bool
    with_stack: bool
    profile_memory: bool

    def make(self, folder: str | os.PathLike[str], mesh: Any = None) -> Profiler:
        """The profiler of one process."""
        return Profiler(
            folder,
            self.period_steps,
            self.warmup_steps,
            self.active_steps,
            mesh,
            ranks=self.ranks,
            record_shapes=self.record_shapes,
            with_stack=self.with_stack,
            profile_memory=self.profile_memory,
        )


class _Traces:
    """The traces of one fit, from its first batch to its end."""

    def __init__(self, settings: _Settings) -> None:
        settings.make(settings.save_dir or ".")  # wrong numbers are told where they are typed
        self._settings = settings
        self._stack = ExitStack()
        self._running: profile | None = None
        self._steps = 0

    @property
    def is_open(self) -> bool:
        """Whether a fit is being traced."""
        return self._running is not None

    def begin(self, trainer: Trainer, folder: str | None) -> None:
        """Before a batch; opens the profiler at the first one."""
        if self._running is None:
            save_dir = self._settings.save_dir or Path(folder or trainer.default_root_dir) / "traces"
            profiler = self._settings.make(save_dir, getattr(trainer.strategy, "device_mesh", None))
            self._steps = trainer.global_step
            self._running = self._stack.enter_context(profiler.open(self._steps))

    def after_batch(self, trainer: Trainer) -> None:
        """Count the step, if the batch has ended one."""
        if self._running is not None and trainer.global_step != self._steps:
            self._steps = trainer.global_step
            self._running.step()

    def end(self) -> None:
        """Write what is left; a later fit opens anew."""
        self._running = None
        self._stack.close()


class PipelineProfiler(LightningProfiler):
    """``Trainer(profiler=PipelineProfiler("traces", period_steps=100, warmup_steps=2, active_steps=2))``.

    Each window of active steps becomes ``save_dir/step_<n>/rank-<rank>-coord-<mesh coordinates>-trace.tar.gz``, written
    off the training thread. The parts of Lightning's loop appear in it under their names.

    Args:
        save_dir: Where the traces go; by default ``traces`` in the Trainer's log directory.
        period_steps: Optimizer steps from the end of one window to the end of the next.
        warmup_steps: Steps before each window in which the profiler is on but nothing is kept.
        active_steps: Steps of each window.
        ranks: Global ranks that record and write; by default all.
        record_shapes: Also keep the shapes of operator arguments.
        with_stack: Also keep source locations; slow.
        profile_memory: Also keep allocations.

    Raises:
        PipelineConfigurationError: The steps do not fit into the period.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        period_steps: int = 100,
        warmup_steps: int = 2,
        active_steps: int = 2,
        *,
        ranks: Collection[int] | None = None,
        record_shapes: bool = False,
        with_stack: bool = False,
        profile_memory: bool = False,
    ) -> None:
        super().__init__()
        self._traces = _Traces(
            _Settings(
                save_dir, period_steps, warmup_steps, active_steps, ranks, record_shapes, with_stack, profile_memory
            )
        )
        self._log_dir: str | None = None
        self._named: dict[str, Any] = {}
        self._handled: BaseException | None = None

    def setup(self, stage: str, local_rank: int | None = None, log_dir: str | None = None) -> None:
        """A run of the Trainer begins."""
        super().setup(stage, local_rank, log_dir)
        self._log_dir = log_dir

    def start(self, action_name: str) -> None:
        """A part of the loop begins."""
        if action_name == BATCH and not self._traces.is_open:
            self._handled = sys.exc_info()[1]
            self._traces.begin(self._trainer, self._log_dir)
        if self._traces.is_open:
            mark = torch.profiler.record_function(action_name)
            mark.__enter__()
            self._named[action_name] = mark

    def stop(self, action_name: str) -> None:
        """It ended."""
        mark = self._named.pop(action_name, None)
        if mark is not None:
            mark.__exit__(None, None, None)
        if action_name == BATCH:
            self._traces.after_batch(self._trainer)
        # after an error Lightning tears no profiler down; the end of a loader is an error too, but not of the fit
        error = sys.exc_info()[1]
        if error is not None and error is not self._handled and not isinstance(error, StopIteration):
            self._end()

    def teardown(self, stage: str | None) -> None:
        """A run of the Trainer ends."""
        self._end()
        super().teardown(stage)

    def _end(self) -> None:
        for mark in self._named.values():
            mark.__exit__(None, None, None)
        self._named.clear()
        self._traces.end()

    @property
    def _trainer(self) -> Trainer:
        # the Trainer puts its module here before a run; there is no public way from a profiler to it
        module: LightningModule = self._lightning_module  # type: ignore[attr-defined]
        return module.trainer


class PeriodicTraces(Callback):
    """``Trainer(callbacks=[PeriodicTraces("traces", period_steps=100, warmup_steps=2, active_steps=2)])``.

    The same traces as :class:`PipelineProfiler` writes, beside whatever profiler the Trainer has; without names for the
    parts of Lightning's loop.

    Args:
        save_dir, period_steps, warmup_steps, active_steps, ranks, record_shapes, with_stack, profile_memory: See
            :class:`PipelineProfiler`.

    Raises:
        PipelineConfigurationError: The steps do not fit into the period.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        period_steps: int = 100,
        warmup_steps: int = 2,
        active_steps: int = 2,
        *,
        ranks: Collection[int] | None = None,
        record_shapes: bool = False,
        with_stack: bool = False,
        profile_memory: bool = False,
    ) -> None:
        self._traces = _Traces(
            _Settings(
                save_dir, period_steps, warmup_steps, active_steps, ranks, record_shapes, with_stack, profile_memory
            )
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open the profiler."""
        self._traces.begin(trainer, trainer.log_dir)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the step."""
        self._traces.after_batch(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write what is left."""
        self._traces.end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write what is left."""
        self._traces.end()
