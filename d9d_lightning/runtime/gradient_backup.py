"""Gradients as they were before a batch, for a batch that has to run again."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

__all__ = ["GradientBackup"]


class GradientBackup:
    """Costs nothing for the first batch of an accumulation window, where there are no gradients yet.

    Args:
        parameters: This rank's parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._kept = [None if p.grad is None else p.grad.clone() for p in self._parameters]

    def undo(self) -> None:
        """Put the gradients back."""
        for parameter, kept in zip(self._parameters, self._kept, strict=True):
            parameter.grad = kept
