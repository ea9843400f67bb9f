"""A callback that draws one step as it was measured, beside the step as it was predicted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from d9d_lightning.errors import PipelineConfigurationError
from d9d_lightning.runtime.step_picture import PICTURES, write_step
from d9d_lightning.runtime.step_report import StepReport

__all__ = ["StepTimeline"]


class StepTimeline(Callback):
    """Writes what every rank did in one training batch of many, and how that compares with the simulation.

    For a batch that is drawn, ``dirpath/batch_<n>.svg`` (or ``.png``, ``.html``) shows both timelines, ``.json`` is the
    same for ``chrome://tracing`` or Perfetto, and ``.txt`` has work, wait, measured and predicted bubble of each rank,
    and the slowest stage. The strategy notes times in every batch anyway; drawing costs something only then.

    >>> callback = StepTimeline(every_n_batches=100)

    Args:
        dirpath: Where to write; by default ``step_timeline`` in the Trainer's log directory.
        every_n_batches: Distance of batches that are drawn, counted from 1 over the whole fit. The first one also
            traces the step, so its times say little.
        picture: ``"svg"``, ``"png"`` or ``"html"``.

    Attributes:
        report: The latest :class:`~d9d_lightning.runtime.step_report.StepReport`, on every rank.

    Raises:
        PipelineConfigurationError: An argument is not allowed, or the Trainer has another strategy.
    """

    def __init__(
        self, dirpath: str | os.PathLike[str] | None = None, every_n_batches: int = 100, picture: str = "svg"
    ) -> None:
        if not isinstance(every_n_batches, int) or every_n_batches < 1:
            raise PipelineConfigurationError(
                f"StepTimeline(every_n_batches={every_n_batches!r}): expected a whole number of at least 1, such as 100"
            )
        if f".{picture}" not in PICTURES:
            raise PipelineConfigurationError(
                f"StepTimeline(picture={picture!r}): expected {', '.join(ending[1:] for ending in PICTURES)}"
            )
        self.report: StepReport | None = None
        self._dirpath = None if dirpath is None else Path(dirpath)
        self._every = every_n_batches
        self._ending = picture

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """See that there is a pipeline to look at, and agree on where to write."""
        if not hasattr(trainer.strategy, "step_report"):
            raise PipelineConfigurationError(
                f"StepTimeline draws the steps of D9DStrategy, the Trainer has {type(trainer.strategy).__name__}; type "
                "Trainer(strategy=D9DStrategy(...)) or leave the callback out"
            )
        if self._dirpath is None:
            # the directory of a logger is known to rank 0 alone, and asking may be collective
            folder = trainer.log_dir or trainer.default_root_dir
            self._dirpath = Path(folder) / "step_timeline"

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Draw, where it is time to; collective over the pipeline."""
        done = trainer.fit_loop.epoch_loop.total_batch_idx + 1
        if done % self._every:
            return
        strategy: Any = trainer.strategy
        self.report = strategy.step_report()
        if trainer.is_global_zero and self._dirpath is not None:
            path = self._dirpath / f"batch_{done}.{self._ending}"
            write_step(self.report, path)
            path.with_suffix(".txt").write_text(self.report.text() + "\n", encoding="utf-8")
