"""From what the user's step returned for a microbatch to the scalar that is back-propagated.

Plain losses count by samples: microbatch ``i`` of ``n_i`` samples counts ``n_i / B``. A step that returns
``{"loss": mean, "loss_weight": w}`` counts by ``w``: roots are multiplied by ``w / reference`` with one constant per
accumulation window, and the gradients are divided once by the sum of all weights, after they were reduced.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from d9d_lightning.errors import PipelineError

__all__ = ["BatchLoss", "StepOutputError", "WeightWindow", "read_step_output"]

LOSS_WEIGHT = "loss_weight"


class StepOutputError(PipelineError, TypeError):
    """``training_step`` returned something that cannot be back-propagated."""


@dataclass(frozen=True)
class MicrobatchLoss:
    """Loss of one microbatch, and its weight where the step gave one."""

    loss: Tensor
    weight: Tensor | float | None


def read_step_output(output: Any) -> MicrobatchLoss:
    """Take the loss out of what ``training_step`` returned.

    Raises:
        StepOutputError: It is None, has no loss, or the loss is not a scalar tensor.
    """
    wanted = "Expected a scalar tensor, or a dict with a scalar tensor under 'loss'"
    if output is None:
        raise StepOutputError(
            "training_step returned None, which skips a batch. A pipeline cannot skip one, because all its ranks must "
            f"run the same work. {wanted}. Type `return loss * 0.0` for a batch that should change nothing."
        )
    weight = None
    if isinstance(output, Mapping):
        if "loss" not in output:
            raise StepOutputError(f"training_step returned a dict with the keys {sorted(map(str, output))}. {wanted}.")
        loss, weight = output["loss"], output.get(LOSS_WEIGHT)
    else:
        loss = output
    if not isinstance(loss, Tensor):
        raise StepOutputError(f"training_step returned a loss of type {type(loss).__name__}. {wanted}.")
    if loss.numel() != 1:
        raise StepOutputError(
            f"training_step returned a loss of shape {tuple(loss.shape)}. {wanted}. Type `return loss.mean()`."
        )
    return MicrobatchLoss(loss.reshape(()), _checked_weight(weight))


def _checked_weight(weight: Any) -> Tensor | float | None:
    if weight is None:
        return None
    if isinstance(weight, Tensor) and weight.numel() == 1:
        return weight.detach().reshape(()).float()
    if isinstance(weight, (int, float)) and not isinstance(weight, bool):
        return float(weight)
    raise StepOutputError(
        f"training_step returned loss_weight={weight!r}. Expected one number, such as the number of tokens that the "
        "mean under 'loss' was taken over."
    )


@dataclass
class WeightWindow:
    """Weights of one accumulation window, pooled over its batches.

    Attributes:
        reference: What weights are divided by before they meet the loss, a power of two so that it is exact; the last
            window's sum gives its size, which all ranks know.
    """

    reference: float = 1.0
    _sum: float = 0.0
    _used: bool = False

    def add(self, batch_weight: float | None) -> None:
        """Count one batch; None means that its losses had no weights."""
        if batch_weight is not None:
            self._sum += batch_weight
            self._used = True

    @property
    def used(self) -> bool:
        """Whether any batch of the window had weights."""
        return self._used

    @property
    def total(self) -> float:
        """Sum of the weights of this replica."""
        return self._sum

    def close(self, pooled: float) -> float:
        """End the window.

        Args:
            pooled: Sum of the weights over replicas.

        Returns:
            What the summed gradients are multiplied with.
        """
        scale = self.reference / pooled if pooled > 0 else 0.0
        if pooled > 0:
            self.reference = 2.0 ** round(math.log2(pooled))
        self._sum, self._used = 0.0, False
        return scale


@dataclass
class BatchLoss:
    """Losses of the microbatches of one batch, on the loss owner.

    Args:
        batch_size: Samples of the batch.
        accumulate: ``accumulate_grad_batches``; plain losses are divided by it, as Lightning does.
        reference: See :class:`WeightWindow`.
    """

    batch_size: int
    accumulate: int
    reference: float
    _losses: list[Tensor] = field(default_factory=list)
    _weights: list[Tensor | float | None] = field(default_factory=list)
    _sizes: list[int] = field(default_factory=list)
    _has_graph: bool = False

    def root(self, output: Any, size: int) -> Tensor:
        """Scalar to back-propagate for a microbatch of ``size`` samples.

        Raises:
            StepOutputError: See :func:`read_step_output`; or only some microbatches gave a weight, or the losses of
                none of them can be differentiated.
        """
        part = read_step_output(output)
        if self._weights and (part.weight is None) != (self._weights[-1] is None):
            raise StepOutputError(
                "training_step gave 'loss_weight' for some microbatches only. Return it for all, or for none."
            )
        self._losses.append(part.loss.detach())
        self._weights.append(part.weight)
        self._sizes.append(size)
        self._has_graph |= part.loss.requires_grad
        if sum(self._sizes) >= self.batch_size and not self._has_graph:
            # a single microbatch without targets is no mistake; the whole batch is, on one device too
            raise StepOutputError(
                "training_step returned a loss that no trained parameter has a part in, so nothing would be learned. "
                "Expected: a loss computed from the module's outputs. Look for `.detach()`, `.item()`, "
                "`torch.no_grad()`, a module whose parameters are all frozen, or a batch without targets."
            )
        if part.weight is None:
            return part.loss * (size / self.batch_size / self.accumulate)
        return part.loss * (part.weight / self.reference)

    def clear(self) -> None:
        """Forget the microbatches seen so far."""
        self._losses.clear()
        self._weights.clear()
        self._sizes.clear()
        self._has_graph = False

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Loss of every microbatch."""
        return tuple(self._losses)

    @property
    def weight(self) -> float | None:
        """Sum of the weights, or None where the losses have none."""
        given = [weight for weight in self._weights if weight is not None]
        return float(sum(given)) if given else None

    def mean(self) -> Tensor:
        """Loss of the batch, as one device would report it."""
        weight = self.weight
        shares = self._sizes if weight is None else [w for w in self._weights if w is not None]
        total = self.batch_size if weight is None else weight
        dtype = self._losses[0].dtype
        if not total:
            return torch.zeros_like(self._losses[0])
        summed = sum((loss.double() * share for loss, share in zip(self._losses, shares, strict=True)), torch.zeros(()))
        return (torch.as_tensor(summed, device=self._losses[0].device) / total).to(dtype)
