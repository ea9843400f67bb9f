"""One batch of validation, test or predict: forwards only, on the placement of the training schedule."""

from __future__ import annotations

from typing import Any

import torch

from d9d_lightning.runtime.batch import merge_outputs
from d9d_lightning.strategy.loggers import loggers_routed
from d9d_lightning.strategy.precision import step_context
from d9d_lightning.strategy.records import combine_records, returned_losses
from d9d_lightning.strategy.session import Session
from d9d_lightning.strategy.training import detach
from d9d_lightning.values import LogRecord, Microbatch

__all__ = ["EvaluationSteps"]

LOOPS = {"validation_step": 1, "test_step": 2, "predict_step": 3}
READERS = {"validation_step": "on_validation_batch_end", "test_step": "on_test_batch_end"}


class EvaluationSteps:
    """Runs evaluation batches of one run."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._seen: dict[tuple[str, int], int] = {}

    def run(self, step_name: str, args: tuple[Any, ...], dataloader: int) -> Any:
        """Outputs of the step for the whole batch.

        Returns:
            On the loss owner what the step returned, merged over microbatches; on other ranks the same where somebody
            reads it, else None.
        """
        session = self._session
        number = self._seen.get((step_name, dataloader), 0)
        self._seen[step_name, dataloader] = number + 1
        microbatches = session.split(args, session.position(LOOPS[step_name], dataloader, number))
        outputs: list[Any] = []
        sizes: list[int] = []
        records = self._run_schedule(step_name, microbatches, outputs, sizes)

        wanted = self._is_shared(step_name)

        def report() -> tuple[Any, list[LogRecord]]:
            combined = combine_records(records, returned_losses(outputs))
            return (merge_outputs(outputs, sizes) if wanted else None), combined

        output, records = session.messenger.share(report)
        if session.book is not None:
            session.book.replay(session.trainer, session.module, records)
        if session.is_loss_owner and not wanted:
            return merge_outputs(outputs, sizes)
        return output

    def _is_shared(self, step_name: str) -> bool:
        if step_name == "predict_step":
            return self._session.someone_reads("on_predict_batch_end")
        return self._session.someone_reads(READERS[step_name])

    def _run_schedule(self, step_name: str, microbatches: Any, outputs: list[Any], sizes: list[int]) -> list[LogRecord]:
        session = self._session
        book = session.book
        user_step = getattr(session.module, step_name)

        def step(microbatch: Microbatch) -> Any:
            if book is not None:
                book.microbatch_size = microbatch.size
            with step_context(session.precision, step_name):
                return user_step(*microbatch.args, **microbatch.kwargs)

        def finish(microbatch: Microbatch, output: Any) -> None:
            outputs.append(detach(output))
            sizes.append(microbatch.size)

        records: list[LogRecord] = []
        metrics = session.back_up_metrics()

        def restart() -> None:
            metrics.restore()
            for written in (outputs, sizes, records):
                written.clear()

        def run() -> None:
            program = session.programs.evaluation(len(microbatches))
            with torch.no_grad(), loggers_routed(session.trainer):
                session.engine.run(
                    step, microbatches, program, finish=finish, restart=restart, training=False, kind=step_name
                )

        if book is None:
            run()
            return []
        with book.capture(session.trainer, owner=session.is_loss_owner, into=records):
            run()
        return records
