"""One training batch: schedule, reduction, and the same loss and logs on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from d9d_lightning.runtime.batch import merge_outputs
from d9d_lightning.strategy.compat import trainer_call
from d9d_lightning.strategy.loggers import loggers_routed
from d9d_lightning.strategy.loop import PipelineOptimization
from d9d_lightning.strategy.losses import LOSS_WEIGHT, BatchLoss, WeightWindow
from d9d_lightning.strategy.measured import Replanner
from d9d_lightning.strategy.precision import announce_backward, scale_root, step_context
from d9d_lightning.strategy.records import combine_records
from d9d_lightning.strategy.reduction import GradientReduction
from d9d_lightning.strategy.session import Session
from d9d_lightning.strategy.witness import GradientWitness
from d9d_lightning.values import LogRecord, Microbatch

__all__ = ["TrainingSteps", "detach"]

TRAINING_LOOP = 0


def detach(tree: Any) -> Any:
    """The same containers with tensors that hold no graph."""
    return tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, tree)


@dataclass
class _Batch:
    """What the loss owner gathers while a batch runs."""

    loss: BatchLoss
    outputs: list[Any] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def clear(self) -> None:
        """Forget a run of the batch that has to be repeated."""
        self.loss.clear()
        self.outputs.clear()
        self.sizes.clear()


class TrainingSteps:
    """Runs training batches of one fit.

    Args:
        session: Collaborators.
        reduction: Sums gradients over replicas and over owners of shared parameters.
        witness: Looks at gradients before hooks can drop them.
        replanner: Looks for a better order once steps were measured.
    """

    def __init__(
        self,
        session: Session,
        reduction: GradientReduction,
        witness: GradientWitness,
        replanner: Replanner | None = None,
    ) -> None:
        self._session = session
        self._reduction = reduction
        self._witness = witness
        self._replanner = replanner
        self._window = WeightWindow()

    def run(self, args: tuple[Any, ...], *, synchronize: bool) -> dict[str, Any]:
        """Forward and backward of one batch.

        Args:
            args: Arguments of ``training_step``.
            synchronize: Whether the optimizer steps after this batch, so that gradients are reduced.

        Returns:
            The loss of the batch under ``"loss"``, equal on every rank, and what else the step returned.
        """
        session = self._session
        trainer = session.trainer
        seen = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        microbatches = session.split(args, session.position(TRAINING_LOOP, 0, seen))
        batch = _Batch(
            BatchLoss(sum(mb.size for mb in microbatches), trainer.accumulate_grad_batches, self._window.reference)
        )
        records = self._run_schedule(batch, microbatches, synchronize)
        loss, weight, extras, records = session.messenger.share(lambda: self._report(batch, records))
        if session.book is not None:
            session.book.replay(trainer, session.module, records)
        self._window.add(weight)
        if synchronize:
            self._reduction.finish(self._window)
        if self._replanner is not None:
            self._replanner.after_batch(len(microbatches))
        optimization = trainer.fit_loop.epoch_loop.automatic_optimization
        if isinstance(optimization, PipelineOptimization) and optimization.before_zero_grad is not None:
            optimization.before_zero_grad()
        self._witness.look()
        announce_backward(session.precision, session.module, loss)
        trainer_call._call_callback_hooks(trainer, "on_after_backward")
        trainer_call._call_lightning_module_hook(trainer, "on_after_backward")
        return {"loss": loss, **extras}

    def _run_schedule(self, batch: _Batch, microbatches: Any, synchronize: bool) -> list[LogRecord]:
        session = self._session
        book = session.book
        program = session.programs.training(len(microbatches))

        def step(microbatch: Microbatch) -> Any:
            if book is not None:
                book.microbatch_size = microbatch.size
            with step_context(session.precision, "training_step"):
                return session.module.training_step(*microbatch.args, **microbatch.kwargs)

        def finish(microbatch: Microbatch, output: Any) -> Tensor:
            root = batch.loss.root(output, microbatch.size)
            batch.outputs.append(detach(output))
            batch.sizes.append(microbatch.size)
            return scale_root(session.precision, root)

        observer = self._reduction.observer(len(microbatches), synchronize=synchronize)
        records: list[LogRecord] = []
        metrics = session.back_up_metrics()

        def restart() -> None:
            metrics.restore()
            batch.clear()
            records.clear()
            if observer is not None:
                observer.restart()

        def run() -> None:
            with self._reduction.step(synchronize=synchronize), loggers_routed(session.trainer):
                session.engine.run(
                    step,
                    microbatches,
                    program,
                    finish=finish,
                    observer=observer,
                    restart=restart,
                    training=True,
                )

        def run_or_abandon() -> None:
            try:
                run()
            except Exception as error:
                if session.engine.is_common(error):
                    self._reduction.abandon()
                raise

        if book is None:
            run_or_abandon()
            return []
        with book.capture(session.trainer, owner=session.is_loss_owner, into=records):
            run_or_abandon()
        return records

    def _report(
        self, batch: _Batch, records: list[LogRecord]
    ) -> tuple[Tensor, float | None, dict[str, Any], list[LogRecord]]:
        extras = _extras(batch) if self._session.someone_reads("on_train_batch_end") else {}
        with torch.no_grad():
            combined = combine_records(records, batch.loss.parts)
            return batch.loss.mean(), batch.loss.weight, extras, combined


def _extras(batch: _Batch) -> dict[str, Any]:
    """What the step returned besides the loss, merged over microbatches."""
    if not all(isinstance(output, Mapping) for output in batch.outputs):
        return {}
    merged = merge_outputs(
        [{key: value for key, value in output.items() if key not in ("loss", LOSS_WEIGHT)} for output in batch.outputs],
        batch.sizes,
    )
    if batch.loss.weight is not None:
        merged[LOSS_WEIGHT] = batch.loss.weight
    return dict(merged)
