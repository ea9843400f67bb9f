"""What one run of a trainer (fit, validate, test, predict) shares between the parts of the strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.plugins.precision import Precision
from torchmetrics import Metric

from d9d_lightning.strategy.compat import is_overridden, trainer_callbacks
from d9d_lightning.strategy.engine import BatchPosition, Engine, split_batch
from d9d_lightning.strategy.logbook import LogBook
from d9d_lightning.strategy.messages import Messenger
from d9d_lightning.strategy.metric_backup import MetricBackup
from d9d_lightning.strategy.metrics import module_metrics
from d9d_lightning.strategy.options import StrategyOptions
from d9d_lightning.strategy.programs import Programs
from d9d_lightning.values import Microbatch

__all__ = ["Session"]


@dataclass
class Session:
    """Collaborators of one run.

    Attributes:
        trainer: The trainer.
        module: The user's module.
        precision: The trainer's precision plugin.
        options: Checked arguments of the strategy.
        engine: The pipeline.
        programs: Programs of the schedule.
        messenger: From the loss owner to the other ranks of its pipeline.
        seed: Seed of the random-number rule.
        replica: Data-parallel rank.
        replicas: Number of data-parallel replicas.
    """

    trainer: Trainer
    module: LightningModule
    precision: Precision
    options: StrategyOptions
    engine: Engine
    programs: Programs
    messenger: Messenger
    seed: int
    replica: int
    replicas: int
    _num_microbatches: int | None = None
    _readers: dict[str, bool] = field(default_factory=dict)
    _metrics: list[Metric] | None = None

    @property
    def is_loss_owner(self) -> bool:
        """Whether this rank finishes the step."""
        return self.messenger.is_source

    @property
    def book(self) -> LogBook | None:
        """Log book of the loop that runs; None in predict."""
        results = self.trainer._results
        return results if isinstance(results, LogBook) else None

    def num_microbatches(self, batch_size: int) -> int:
        """Number of microbatches of the run; ``"auto"`` is decided by the first batch."""
        if self._num_microbatches is None:
            wanted = self.options.num_microbatches
            self._num_microbatches = (
                self.programs.choose_num_microbatches(batch_size) if isinstance(wanted, str) else wanted
            )
        return self._num_microbatches

    def split(self, args: tuple[Any, ...], position: BatchPosition) -> Sequence[Microbatch]:
        """Microbatches of one batch."""
        return split_batch(args, self.num_microbatches, spec=self.options.batch_spec, position=position)

    def back_up_metrics(self) -> MetricBackup:
        """States of the metrics before a batch; only the loss owner updates them."""
        if self._metrics is None:
            self._metrics = list(module_metrics(self.module).values()) if self.is_loss_owner else []
        return MetricBackup(self._metrics)

    def position(self, loop: int, dataloader: int, batch: int) -> BatchPosition:
        """Position of a batch, for the random-number rule."""
        return BatchPosition(self.seed, self.replica, loop, dataloader, batch)

    def someone_reads(self, hook: str) -> bool:
        """Whether the module or a callback that is not Lightning's own gets the outputs of a step in ``hook``."""
        if hook not in self._readers:
            callbacks = [
                callback
                for callback in trainer_callbacks(self.trainer)
                if not type(callback).__module__.startswith(("lightning.", "d9d_lightning."))
                and not isinstance(callback, BasePredictionWriter)
            ]
            self._readers[hook] = is_overridden(hook, self.module) or any(is_overridden(hook, cb) for cb in callbacks)
        return self._readers[hook]
