"""The moment at which an epoch of a loop is over and no hook of its end has run yet."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer

from d9d_lightning.strategy.messages import Messenger
from d9d_lightning.strategy.metrics import MetricStates

__all__ = ["EpochEnds"]


class EpochEnds:
    """Makes every rank able to compute epoch values before anything asks for them.

    Lightning announces this moment to its logger connector, on all ranks, before the first epoch-end hook.

    Args:
        trainer: The trainer.
        module: The user's module.
        messenger: From the loss owner to the others.
        eager: Compute the values at once on all ranks. Progress bars would ask for them on rank 0 only, and computing
            them reduces over replicas.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, messenger: Messenger, *, eager: bool) -> None:
        self._trainer = trainer
        self._states = MetricStates(module)
        self._messenger = messenger
        self._eager = eager

    def install(self) -> None:
        """Listen to the trainer."""
        connector = self._trainer._logger_connector
        if self._messenger.group is None and not self._eager:
            return
        original = type(connector).epoch_end_reached.__get__(connector)

        def epoch_end_reached() -> None:
            self._states.share(self._messenger)
            original()
            if self._eager:
                _ = self._trainer.callback_metrics

        connector.epoch_end_reached = epoch_end_reached  # type: ignore[method-assign]

    def remove(self) -> None:
        """Listen no more."""
        vars(self._trainer._logger_connector).pop("epoch_end_reached", None)
