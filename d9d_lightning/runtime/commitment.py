"""The moment from which a batch cannot be voided any more, so that what it computes may leave the pipeline.

A call that no plan has shows in a forward, on one rank; the others go on with zeros until the end of the program.
Before the last backward of any stage, every forward of the pipeline has run. So an exchange that each rank begins after
its own last forward has ended by then, and nobody waits for it.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

import torch
import torch.distributed as dist

from d9d_lightning.runtime.groups import PipelineGroups

__all__ = ["Commitment", "StepObserver"]


class StepObserver(Protocol):
    """Told of the progress of a batch."""

    def committed(self) -> None:
        """Every forward of the pipeline has run as planned; the last backward of a stage is about to begin."""

    def weights_done(self, stage: int, microbatch: int) -> None:
        """All weight gradients of a stage and microbatch have been accumulated, unless the batch is void."""


class Commitment:
    """Stands between the executor and an observer.

    Args:
        observer: Told of progress.
        groups: The pipeline's groups; None where one process is alone.
        num_microbatches: Backwards per stage.
    """

    def __init__(self, observer: StepObserver, groups: PipelineGroups | None, num_microbatches: int) -> None:
        self._observer = observer
        self._groups = groups
        self._num_microbatches = num_microbatches
        self._begun: Counter[int] = Counter()
        self._failed = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None
        self._is_settled = False

    def forwards_done(self, failed: bool) -> None:
        """This rank has run its last forward."""
        self._failed.fill_(int(failed))
        if self._groups is not None:
            self._work = dist.all_reduce(self._failed, dist.ReduceOp.MAX, group=self._groups.control, async_op=True)

    def weights_due(self, stage: int, microbatch: int) -> None:
        """Weight gradients are about to be accumulated."""
        self._begun[stage] += 1
        if self._is_settled or self._begun[stage] < self._num_microbatches:
            return
        self._is_settled = True
        if self._work is not None:
            self._work.wait()
        if not self._failed.item():
            self._observer.committed()

    def weights_done(self, stage: int, microbatch: int) -> None:
        """They have been."""
        self._observer.weights_done(stage, microbatch)
