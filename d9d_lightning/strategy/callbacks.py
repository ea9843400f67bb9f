"""Callbacks of Lightning that take for granted that every rank has all of the module, or a part of the data."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import BasePredictionWriter

from d9d_lightning.strategy.compat import trainer_callbacks

__all__ = ["CallbackAdapters"]


class CallbackAdapters:
    """Adapts callbacks for one run, on the instances, and takes it back afterwards.

    Args:
        trainer: The trainer.
        is_first: Whether this process is rank 0 of the world.
    """

    def __init__(self, trainer: Trainer, *, is_first: bool) -> None:
        self._trainer = trainer
        self._is_first = is_first
        self._bound: list[tuple[object, str]] = []

    def install(self) -> None:
        """Prediction writers write on rank 0 only: it gets every sample once."""
        if self._is_first:
            return
        for callback in trainer_callbacks(self._trainer):
            if isinstance(callback, BasePredictionWriter):
                self._bind(callback, "write_on_batch_end", _do_nothing)
                self._bind(callback, "write_on_epoch_end", _do_nothing)

    def remove(self) -> None:
        """Give the callbacks their own methods back."""
        for owner, name in self._bound:
            vars(owner).pop(name, None)
        self._bound.clear()

    def _bind(self, owner: object, name: str, method: Any) -> None:
        if name not in vars(owner):
            vars(owner)[name] = method
            self._bound.append((owner, name))


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for a method that another rank runs."""
