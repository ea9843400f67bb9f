"""What steps of this run really took, and a better order of actions from it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.distributed import ProcessGroup

from d9d_lightning.errors import PipelineStateError
from d9d_lightning.runtime.groups import PipelineGroups
from d9d_lightning.runtime.recorder import StepRecord, StepRecorder
from d9d_lightning.runtime.step_report import StepReport, compare_step, measure_costs
from d9d_lightning.schedule import Costs
from d9d_lightning.strategy.programs import Programs

__all__ = ["MeasuredSteps", "Replanner"]

REPLAN_AFTER = 10
"""Batches of a fit before ``auto`` plans again; the first of them also trace, allocate and warm up."""


class MeasuredSteps:
    """The records of all ranks of this pipeline.

    Args:
        recorder: Those of this rank.
        groups: Groups of the pipeline; None where one process has all stages.
    """

    def __init__(self, recorder: StepRecorder, groups: PipelineGroups | None) -> None:
        self._recorder = recorder
        self._groups = groups

    def report(self) -> StepReport:
        """The latest training step beside the simulation of its program; collective over the pipeline.

        Raises:
            PipelineStateError: No training step has gone well yet.
        """
        program, latest = self._recorder.program, self._recorder.latest
        if program is None or latest is None:
            raise PipelineStateError("no training step was recorded yet; ask for the report after a training batch")
        return compare_step(program, self._gather((latest,)))

    def costs(self) -> Costs:
        """Costs of actions in the latest steps of the latest program; collective over the pipeline."""
        program = self._recorder.program
        if program is None:
            raise PipelineStateError("no training step was recorded yet, so there are no costs")
        return measure_costs(program, self._gather(self._recorder.records_of(program)))

    def _gather(self, records: tuple[StepRecord, ...]) -> list[StepRecord]:
        if self._groups is None:
            return list(records)
        return [record for of_rank in self._groups.gather(records) for record in of_rank]


class Replanner:
    """Once in a fit, ``schedule="auto"`` looks for an order for the costs that were measured.

    Every rank decides at the same batch, from the same numbers. Stages stay where they are, so no parameter moves and
    no group is made; only the order of actions may change.

    Args:
        programs: The schedule.
        measured: Records of this pipeline.
        world: All processes; None where there is one. Replicas must run the same program, so they take the costs of
            the first pipeline.
    """

    def __init__(self, programs: Programs, measured: MeasuredSteps, world: ProcessGroup | None) -> None:
        self._programs = programs
        self._measured = measured
        self._world = world
        self._batches = 0

    def after_batch(self, num_microbatches: int) -> None:
        """Between two optimizer steps; collective when it is time.

        Args:
            num_microbatches: Of the batch that has just run.
        """
        self._batches += 1
        if self._batches != REPLAN_AFTER or not self._programs.is_adaptable:
            return
        if torch.are_deterministic_algorithms_enabled():
            return  # the order of sums would depend on the clock
        box = [self._measured.costs()]
        if self._world is not None:
            dist.broadcast_object_list(box, dist.get_global_rank(self._world, 0), group=self._world)
        rank_zero_info(f"D9DStrategy: {self._programs.adapt(box[0], num_microbatches)}")
