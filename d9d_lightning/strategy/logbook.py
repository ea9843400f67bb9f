"""A result collection that holds the same entries on every rank of a pipeline.

While a step runs, the loss owner writes down what is logged and every other rank drops it. Afterwards the owner's
records, combined over microbatches, are replayed on every rank through Lightning's own code; loggers, progress bars,
callbacks and schedulers then need no change at all.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torchmetrics import Metric

from d9d_lightning.strategy.compat import ResultCollection
from d9d_lightning.strategy.records import MetricReading
from d9d_lightning.values import LogRecord

__all__ = ["LogBook", "install_logbooks"]


class _Mode(enum.Enum):
    """What happens to ``log``."""

    LIVE = enum.auto()
    """It is Lightning's own."""
    RECORD = enum.auto()
    """It is written down."""
    MUTE = enum.auto()
    """It is dropped; the loss owner writes it down."""


class LogBook(ResultCollection):
    """See the module. Made from, and used like, Lightning's own collection.

    Args:
        training: Whether it belongs to the training loop.
        reduce: How ``sync_dist`` reduces a value over replicas.
        agree: Raises if replicas are about to replay different keys.
    """

    def __init__(
        self,
        training: bool,
        reduce: Callable[..., Any],
        agree: Callable[[Sequence[LogRecord]], None] | None = None,
    ) -> None:
        super().__init__(training)
        self._mode = _Mode.LIVE
        self._reduce = reduce
        self.agree = agree
        self._records: list[LogRecord] = []
        self.microbatch_size = 1

    @contextmanager
    def capture(
        self, trainer: Trainer, *, owner: bool, into: list[LogRecord] | None = None
    ) -> Iterator[list[LogRecord]]:
        """Write down what is logged inside; the list is complete when the context ends, and empty off the owner.

        Args:
            trainer: The trainer.
            owner: Whether this rank's logs count.
            into: List to fill; a new one by default.
        """
        connector = trainer._logger_connector
        before = connector._current_fx
        self._mode, self._records = (_Mode.RECORD if owner else _Mode.MUTE), [] if into is None else into
        try:
            yield self._records
        finally:
            self._mode, self._records = _Mode.LIVE, []
            # the first replay of an epoch decides by this field whether old values are dropped; it must not have moved
            connector._current_fx = before

    def log(self, fx: str, name: str, value: Any, **options: Any) -> None:
        """Lightning's ``log``, except while a step is captured."""
        if self._mode is _Mode.LIVE:
            super().log(fx, name, value, **options)
        elif self._mode is _Mode.RECORD:
            options.pop("sync_dist_fn", None)
            if isinstance(value, Metric):
                value = MetricReading(options["metric_attribute"], value._forward_cache)
            elif hasattr(value, "detach"):
                value = value.detach()
            self._records.append(LogRecord(fx, name, value, options, self.microbatch_size))

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Lightning's ``reset``; while a step is captured the replay decides instead, equally on every rank."""
        if self._mode is _Mode.LIVE:
            super().reset(metrics, fx)

    @staticmethod
    def _get_cache(result_metric: Any, on_step: bool) -> Any:
        # Lightning would advise sync_dist=True as soon as there is a process group; every rank has the same value here
        if not on_step and result_metric.is_tensor and result_metric.meta.on_epoch and result_metric._computed is None:
            result_metric.compute()
        return ResultCollection._get_cache(result_metric, on_step)

    def replay(self, trainer: Trainer, module: LightningModule, records: Sequence[LogRecord]) -> None:
        """Log the records as if the step had run here."""
        connector = trainer._logger_connector
        if self.agree is not None:
            self.agree(records)
        for record in records:
            if connector.should_reset_tensors(record.hook):
                self.reset(metrics=False, fx=record.hook)
            value = record.value
            if isinstance(value, MetricReading):
                value = _metric_with(module, value)
            super().log(record.hook, record.name, value, sync_dist_fn=self._reduce, **record.options)
            connector._current_fx = record.hook

    def __reduce_ex__(self, protocol: Any) -> Any:
        # the bound reduction would drag the strategy and its process groups along
        return (_plain_collection, (self.training, dict(self)))


def _plain_collection(training: bool, items: dict[str, Any]) -> Any:
    collection = ResultCollection(training)
    collection.update(items)
    return collection


def _metric_with(module: LightningModule, reading: MetricReading) -> Metric:
    metric = module.get_submodule(reading.attribute)
    if not isinstance(metric, Metric):
        raise TypeError(f"self.log got a metric from {reading.attribute!r}, but a {type(metric).__name__} lives there")
    metric._forward_cache = reading.forward_value
    return metric


def install_logbooks(
    trainer: Trainer, reduce: Callable[..., Any], agree: Callable[[Sequence[LogRecord]], None] | None
) -> None:
    """Give every loop of the trainer a log book, once; how replicas agree is new in every run."""
    epoch_loop = trainer.fit_loop.epoch_loop
    loops = (
        (epoch_loop, True),
        (epoch_loop.val_loop, False),
        (trainer.validate_loop, False),
        (trainer.test_loop, False),
    )
    for loop, training in loops:
        if not isinstance(loop._results, LogBook):
            loop._results = LogBook(training, reduce)
        loop._results.agree = agree
