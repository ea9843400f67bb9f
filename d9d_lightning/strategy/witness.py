"""Notices a hook that drops gradients on one rank, because of what only that rank sees, while the others keep theirs.

``if any gradient is NaN: self.zero_grad()`` in a hook is right on one device. In a pipeline each rank sees the
gradients of its own stages, so one rank would skip the step and the others take it. Gradients are looked at only where
the module or a callback has such a hook.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from d9d_lightning.runtime.groups import maximum_over
from d9d_lightning.strategy.disagreement import RanksDisagreeError

__all__ = ["DROPPING_HOOKS", "GradientWitness"]

DROPPING_HOOKS = ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping")
"""Hooks that can change gradients before an optimizer steps."""


class GradientWitness:
    """Looks at gradients before and after the hooks of a step.

    Args:
        parameters: This rank's parameters by name.
        group: A gloo group of the pipeline; None where one rank sees everything.
        is_needed: Whether anybody has a hook of DROPPING_HOOKS; the same on all ranks.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], group: ProcessGroup | None, is_needed: Callable[[], bool]
    ) -> None:
        self._parameters = list(parameters.values())
        self._group = group
        self._is_needed = is_needed
        self._was_bad = False
        self._was_good: list[nn.Parameter] = []

    def look(self) -> None:
        """Before the hooks: which gradients are finite."""
        if self._group is None or not self._is_needed():
            return
        filled = [(p, p.grad) for p in self._parameters if p.grad is not None and _can_look(p.grad)]
        gradients = [gradient for _, gradient in filled]
        if _sums_are_finite(gradients) and not self._was_bad:
            return  # only after a bad gradient does it matter which ones were good
        sizes = _largest(gradients)
        finite = [size < float("inf") for size in sizes]  # neither inf nor NaN is
        self._was_bad |= not all(finite)
        self._was_good = [p for (p, _), size, good in zip(filled, sizes, finite, strict=True) if good and size > 0]

    def compare(self) -> None:
        """After the hooks, before the optimizer steps; collective where :meth:`look` looked.

        Raises:
            RanksDisagreeError: A rank with gradients that were not finite has dropped the others of its gradients too,
                and another rank has kept its own.
        """
        if self._group is None or not self._is_needed():
            return
        was_bad, self._was_bad = self._was_bad, False
        good, self._was_good = self._was_good, []
        dropped = was_bad and any(not _remains(p) for p in good)
        if maximum_over([dropped], self._group) == [1]:
            self._tell(dropped, any(map(_remains, self._parameters)))

    def _tell(self, dropped: bool, kept: bool) -> None:
        states: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(states, (dist.get_rank(), dropped, kept and not dropped), group=self._group)
        who_dropped = sorted(rank for rank, has_dropped, _ in states if has_dropped)
        who_kept = sorted(rank for rank, _, has_kept in states if has_kept)
        if who_kept:
            raise RanksDisagreeError(
                f"a hook dropped the gradients on ranks {who_dropped}, where some were not finite, and kept them on "
                f"ranks {who_kept}. Every rank sees the gradients of its own stages, so let all of them decide: type "
                "`bad = self.trainer.strategy.reduce_boolean_decision(bad, all=False)` before the `if bad:` in "
                f"{', '.join(DROPPING_HOOKS)}, whichever of them skips the step."
            )


def _sums_are_finite(gradients: list[Tensor]) -> bool:
    """False wherever an element is not finite. It may also be False where a sum overflows.

    A sum reads memory at full speed; on CPUs a largest value takes nine times as long.
    """
    if not gradients:
        return True
    sums = torch.stack([gradient.sum().to(gradients[0].device, torch.float64) for gradient in gradients])
    return bool(sums.isfinite().all())


def _largest(gradients: list[Tensor]) -> list[float]:
    if not gradients:
        return []
    norms = torch._foreach_norm(gradients, float("inf"))
    return [float(norm) for norm in torch.stack([norm.float().to(norms[0].device) for norm in norms]).tolist()]


def _can_look(gradient: Tensor) -> bool:
    return gradient.layout is torch.strided and gradient.numel() > 0


def _remains(parameter: nn.Parameter) -> bool:
    gradient = parameter.grad
    return gradient is not None and (not _can_look(gradient) or bool(gradient.count_nonzero()))
