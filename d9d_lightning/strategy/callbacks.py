"""Callbacks of Lightning that take for granted that every rank has all of the module, or a part of the data."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, BasePredictionWriter, WeightAveraging
from torch.optim import Optimizer

from d9d_lightning.strategy.averaging import give_up_foreign_parts
from d9d_lightning.strategy.compat import is_overridden, trainer_callbacks
from d9d_lightning.strategy.outside import Around, run_around

__all__ = ["CallbackAdapters"]


CALLBACK_HOOKS = tuple(
    name for name in dir(Callback) if name.startswith("on_") and not name.endswith(("_checkpoint", "_exception"))
)
"""Hooks of callbacks in which a user may call the module."""


class CallbackAdapters:
    """Adapts callbacks for one run, and takes it back afterwards.

    - Prediction writers write on rank 0 only, which gets every sample once.
    - Weight averages keep this rank's part.
    - Finetuning looks for parameters by identity: their values may be elsewhere.

    Args:
        trainer: The trainer.
        module: The user's module.
        is_first: Whether this process is rank 0 of the world.
        is_split: Whether other ranks hold parts of the module.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, *, is_first: bool, is_split: bool) -> None:
        self._trainer = trainer
        self._module = module
        self._is_first = is_first
        self._is_split = is_split
        self._bound: list[tuple[Any, str, Any]] = []

    def install(self, around: Around) -> None:
        """Adapt; the module is placed already.

        Args:
            around: Context in which hooks of the user's own callbacks may call the module.
        """
        for callback in trainer_callbacks(self._trainer):
            if self._is_split and not type(callback).__module__.startswith(("lightning.", "d9d_lightning.")):
                for name in CALLBACK_HOOKS:
                    if is_overridden(name, callback):
                        self._bind(callback, name, run_around(getattr(callback, name), around))
        for callback in trainer_callbacks(self._trainer):
            if isinstance(callback, BasePredictionWriter) and not self._is_first:
                self._bind(callback, "write_on_batch_end", _do_nothing)
                self._bind(callback, "write_on_epoch_end", _do_nothing)
            if isinstance(callback, WeightAveraging) and self._is_split and callback._average_model is not None:
                give_up_foreign_parts(callback._average_model, self._module)
            if isinstance(callback, BaseFinetuning) and self._is_split:
                self._bind(BaseFinetuning, "filter_on_optimizer", staticmethod(_not_in_optimizer))

    def remove(self) -> None:
        """Give callbacks their own methods back."""
        for owner, name, before in reversed(self._bound):
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._bound.clear()

    def complete(self, checkpoint: MutableMapping[str, Any], groups: Iterable[list[list[str]]]) -> None:
        """Put into the states of finetuning callbacks the names of all parameters, not only of this rank's.

        Args:
            checkpoint: On its way to the file.
            groups: For every optimizer, the names of each group.
        """
        keys = [c.state_key for c in trainer_callbacks(self._trainer) if isinstance(c, BaseFinetuning)]
        for key in keys:
            state = checkpoint.get("callbacks", {}).get(key)
            if state is None:
                continue
            metadata = state.get("internal_optimizer_metadata", {})
            completed = dict(metadata)
            for index, names in enumerate(groups):
                if index in metadata:
                    completed[index] = [
                        {**group, "params": full} for group, full in zip(metadata[index], names, strict=False)
                    ]
            checkpoint["callbacks"][key] = {**state, "internal_optimizer_metadata": completed}

    def _bind(self, owner: Any, name: str, method: Any) -> None:
        before = vars(owner).get(name)
        setattr(owner, name, method)
        self._bound.append((owner, name, before))


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for a method that another rank runs."""


def _not_in_optimizer(optimizer: Optimizer, params: Iterable[Any]) -> list[Any]:
    """Parameters that no group of the optimizer holds."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return [parameter for parameter in params if id(parameter) not in held]
