"""Averages of weights (EMA and the like) over the part of a module that this rank holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from d9d_lightning.partition.placeholder import is_placeholder
from d9d_lightning.strategy.compat import trainer_callbacks

__all__ = ["PartialAverage", "give_up_foreign_parts", "trained_state"]


class PartialAverage(AveragedModel):
    """An average that is updated where this rank has parameters, and nowhere else."""

    def update_parameters(self, model: nn.Module) -> None:
        """Average the parameters that ``model`` holds on this rank."""
        whole = self.module
        own = _Holder(_aligned(whole.parameters(), model.parameters()), whole.buffers())
        current = _Holder((p for p in model.parameters() if not is_placeholder(p)), model.buffers())
        self._modules["module"] = own
        try:
            super().update_parameters(current)
        finally:
            self._modules["module"] = whole


class _Holder(nn.Module):
    """A flat module of given tensors."""

    def __init__(self, parameters: Iterable[Tensor], buffers: Iterable[Tensor]) -> None:
        super().__init__()
        self._parameters.update({str(i): p for i, p in enumerate(parameters)})  # type: ignore[misc]
        self._buffers.update({f"b{i}": b for i, b in enumerate(buffers)})


def _aligned(averages: Iterable[Tensor], currents: Iterable[Tensor]) -> list[Tensor]:
    """Averages of the parameters that are here."""
    return [average for average, now in zip(averages, currents, strict=True) if not is_placeholder(now)]


def give_up_foreign_parts(average: AveragedModel, model: nn.Module) -> None:
    """Drop the averages of parameters that other ranks own, and update only the others from now on.

    Args:
        average: Made from the module, whole or not.
        model: The module, of which this rank holds a part.
    """
    replacement = {
        id(old): now
        for old, now in zip(average.module.parameters(), model.parameters(), strict=True)
        if is_placeholder(now) and not is_placeholder(old)
    }
    for child in average.module.modules():
        for leaf, held in child._parameters.items():
            if held is not None and id(held) in replacement:
                child._parameters[leaf] = replacement[id(held)]
    average.__class__ = PartialAverage


def trained_state(trainer: Trainer, checkpoint: Mapping[str, Any]) -> Mapping[str, Any]:
    """The state dict to train on from.

    Weight averaging saves the averages as ``state_dict`` and what is trained beside it. When a fit is resumed its
    callback loads the second over the first, which is too early here: a module is filled once it is placed.
    """
    averages = any(
        isinstance(callback, WeightAveraging) and callback._average_model is not None
        for callback in trainer_callbacks(trainer)
    )
    resumes = averages and "averaging_state" in checkpoint
    state: Mapping[str, Any] = checkpoint["current_model_state" if resumes else "state_dict"]
    return state
