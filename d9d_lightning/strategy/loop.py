"""The inner optimization loop: zero gradients first, then the whole schedule, then the optimizer.

Lightning zeroes gradients between ``training_step`` and ``backward``. A pipeline interleaves the two, so this closure
zeroes first. ``on_before_zero_grad`` still comes after the step: a teacher that it updates must not change before.
Nothing above this object changes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from d9d_lightning.strategy.compat import AutomaticOptimization, Closure, ClosureResult, trainer_call
from d9d_lightning.strategy.stepping import StepAgreement, skipped_closure

__all__ = ["PipelineOptimization", "install_loop"]


class PipelineClosure(Closure):
    """Runs forward and backward of all microbatches inside the step function."""

    has_run = False

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:
        """Zero gradients, then run the schedule."""
        self.has_run = True
        if self._zero_grad_fn is not None:
            self._zero_grad_fn()
        return self._step_fn()


class PipelineOptimization(AutomaticOptimization):
    """Lightning's automatic optimization with the closure above.

    Attributes:
        before_zero_grad: Calls the hooks of that name; None where the batch adds to gradients that are there.
        agreement: Compares which ranks step; a new one in each run.
    """

    before_zero_grad: Callable[[], None] | None = None
    agreement: StepAgreement | None = None

    def _optimizer_step(self, batch_idx: int, train_step_and_backward_closure: Callable[[], Tensor | None]) -> None:
        super()._optimizer_step(batch_idx, train_step_and_backward_closure)
        closure = train_step_and_backward_closure
        if isinstance(closure, PipelineClosure) and not closure.has_run:
            raise skipped_closure(self.trainer.global_rank, batch_idx)
        if self.agreement is not None:
            self.agreement.end()

    def _make_closure(self, kwargs: OrderedDict[str, Any], optimizer: Optimizer, batch_idx: int) -> Closure:
        is_first = self._make_zero_grad_fn(batch_idx, optimizer) is not None
        self.before_zero_grad = partial(self._on_before_zero_grad, optimizer) if is_first else None
        zero_grad = partial(self._optimizer_zero_grad, batch_idx, optimizer) if is_first else None
        return PipelineClosure(self._make_step_fn(kwargs), None, zero_grad)

    def _training_step(self, kwargs: OrderedDict[str, Any]) -> ClosureResult:
        output = trainer_call._call_strategy_hook(self.trainer, "training_step", *kwargs.values())
        return self.output_result_cls.from_training_step_output(output, self.trainer.accumulate_grad_batches)


def install_loop(trainer: Trainer, agreement: StepAgreement) -> None:
    """Replace the inner loop of a trainer, once, keeping its progress: ``global_step`` is derived from that.

    Args:
        trainer: The trainer.
        agreement: Compares which ranks step.
    """
    epoch_loop = trainer.fit_loop.epoch_loop
    loop = epoch_loop.automatic_optimization
    if not isinstance(loop, PipelineOptimization):
        new = PipelineOptimization(trainer)
        new.optim_progress = loop.optim_progress
        epoch_loop.automatic_optimization = loop = new
    loop.agreement = agreement
