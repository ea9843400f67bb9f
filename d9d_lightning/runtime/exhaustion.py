"""An error that memory ran out says where, what the rank held at that moment, and what helps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from d9d_lightning.stage.stage import PipelineStage

__all__ = ["explain_exhaustion", "is_exhaustion"]

MEGABYTE = 2**20
_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory", "alloc_cpu", "bad_alloc")


def is_exhaustion(error: BaseException) -> bool:
    """Whether an error says that the device or the host has no memory left."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _MESSAGES)


def explain_exhaustion(
    error: BaseException,
    where: str,
    parameters: Iterable[Tensor],
    optimizer_states: Iterable[Tensor],
    stages: Iterable[PipelineStage],
) -> None:
    """Add to the message of an error, which stays what it is, where it happened and what was held.

    Args:
        error: One that :func:`is_exhaustion`.
        where: The action and unit.
        parameters: This rank's parameters.
        optimizer_states: What its optimizers keep; nothing before their first step.
        stages: This rank's stages, as they were when it happened.
    """
    own = list(parameters)
    gradients = [parameter.grad for parameter in own if parameter.grad is not None]
    states = list(optimizer_states)
    held = [f"{_megabytes(own)} of parameters", f"{_megabytes(gradients)} of gradients"]
    held.append(f"{_megabytes(states)} of optimizer states" if states else "no optimizer states yet")
    for stage in stages:
        activations, waiting = stage.held_bytes()
        held += [f"stage {stage.index}: {_list(activations)} of activations"] if activations else []
        held += [f"stage {stage.index}: {_list(waiting)} for weight gradients to come"] if waiting else []
    text = (
        f"Memory ran out in {where}. This rank then held {'; '.join(held)}. Less is held with "
        "smaller microbatches (num_microbatches=), with activation_checkpointing=, with a schedule that keeps "
        'fewer of them ("v_min", "v_half", "1f1b"), or with more ranks.'
    )
    first = str(error.args[0]) if error.args else ""
    # still one argument: Lightning's batch-size finder knows the error by that
    error.args = (f"{first}\n{text}" if first else text, *error.args[1:])


def _megabytes(tensors: Iterable[Tensor]) -> str:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return _text(sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values()))


def _list(sizes: dict[int, int]) -> str:
    return ", ".join(f"microbatch {number} {_text(size)}" for number, size in sorted(sizes.items()))


def _text(size: int) -> str:
    return f"{size / MEGABYTE:.1f} MB"
