"""After the schedule: gradients summed over owners of shared parameters, averaged over replicas, divided by weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from d9d_lightning.errors import GradientSyncError, UnplannedCallError
from d9d_lightning.gradients import GradientSynchronizer, scale_gradients
from d9d_lightning.strategy.losses import WeightWindow
from d9d_lightning.strategy.options import StrategyOptions

__all__ = ["GradientReduction", "StageObserver"]


class StageObserver:
    """Lets a bucket leave as soon as its stages have had their last backward of a step.

    A stage's first backward tells how many gradients each of its parameters will get in all, so that buckets leave
    inside its last backward; when that is over, those that were used unevenly leave too.

    Args:
        synchronizer: Told which parameters are done.
        by_stages: Gives parameters by the stages of this rank that use them, once the batch is planned; those of
            several stages wait for the last of these.
        num_microbatches: Backwards per stage and step.
    """

    def __init__(
        self,
        synchronizer: GradientSynchronizer,
        by_stages: Callable[[], Mapping[tuple[int, ...], Sequence[Tensor]]],
        num_microbatches: int,
    ) -> None:
        self._synchronizer = synchronizer
        self._read_stages = by_stages
        self._by_stages: Mapping[tuple[int, ...], Sequence[Tensor]] = {}
        self._num_microbatches = num_microbatches
        self._seen: dict[int, int] = {}
        synchronizer.hold()

    def committed(self) -> None:
        """The batch will not have to run again."""
        self._synchronizer.release()

    def restart(self) -> None:
        """Count from the start again, for a batch that runs again.

        Raises:
            UnplannedCallError: A bucket has left already, with gradients that no replica can take back.
        """
        self._seen = {}
        try:
            self._synchronizer.recount()
            self._synchronizer.hold()
        except GradientSyncError as error:
            raise UnplannedCallError(
                "a backward differed from that of the same units in earlier batches, after some gradients of this "
                "batch had been reduced over replicas. Give an example_batch=... to D9DStrategy that shows every kind "
                "of step, or train with data_parallel_size=1."
            ) from error

    def weights_done(self, stage: int, microbatch: int) -> None:
        """All weight gradients of a stage and microbatch are there."""
        if not self._seen:
            self._by_stages = self._read_stages()
        seen = self._seen[stage] = self._seen.get(stage, 0) + 1
        if seen == self._num_microbatches:
            self._synchronizer.mark_done(self._finished_with(stage))
        elif seen == 1:
            self._synchronizer.expect_repeats(self._by_stages.get((stage,), ()), self._num_microbatches)

    def _finished_with(self, stage: int) -> list[Tensor]:
        done = {one for one, seen in self._seen.items() if seen == self._num_microbatches}
        return [
            parameter
            for stages, parameters in self._by_stages.items()
            if stage in stages and done.issuperset(stages)
            for parameter in parameters
        ]


class GradientReduction:
    """Everything that happens to gradients between the first backward of a step and ``on_after_backward``.

    Args:
        parameters: This rank's parameters by name.
        stages: Stages that use each parameter, by name; may grow during the run.
        shared: For each set of owners, its group and the names of the parameters that its members share.
        replicas: Group of data-parallel replicas, or None where there is one.
        options: ``bucket_size_mb`` and ``gradient_dtype``.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        stages: Mapping[str, tuple[int, ...]],
        shared: Sequence[tuple[ProcessGroup, tuple[str, ...]]],
        replicas: ProcessGroup | None,
        options: StrategyOptions,
    ) -> None:
        self._replicas = replicas
        self._stages = stages
        self._parameters = dict(parameters)
        groups: dict[Tensor, ProcessGroup] = {
            self._parameters[name]: group for group, names in shared for name in names
        }
        self._shared_names = {name for _, names in shared for name in names}
        self._synchronizer: GradientSynchronizer | None = None
        if replicas is not None or groups or options.gradient_dtype is not None:
            self._synchronizer = GradientSynchronizer(
                self._groups_of_stages(),
                options.bucket_size_mb,
                None,
                gradient_dtype=options.gradient_dtype,
            )
            self._synchronizer.bind(mesh=(replicas,) if replicas is not None else (), shared=groups)

    def _groups_of_stages(self) -> list[list[tuple[str, nn.Parameter]]]:
        # stages of one rank finish apart: in one bucket, the first would wait for the last
        groups: dict[tuple[int, ...], list[tuple[str, nn.Parameter]]] = {}
        for name, parameter in self._parameters.items():
            groups.setdefault(self._stages[name], []).append((name, parameter))
        # the synchronizer expects the last group to be ready first
        return [groups[stages] for stages in sorted(groups, key=lambda stages: (len(stages) == 1, stages))]

    def _by_stages(self) -> dict[tuple[int, ...], list[Tensor]]:
        found: dict[tuple[int, ...], list[Tensor]] = {}
        for name, parameter in self._parameters.items():
            if name not in self._shared_names:
                found.setdefault(self._stages[name], []).append(parameter)
        return found

    def observer(self, num_microbatches: int, *, synchronize: bool) -> StageObserver | None:
        """What the pipeline tells of its progress; None where no bucket leaves before the batch is over."""
        if self._synchronizer is None or self._replicas is None or not synchronize:
            return None
        return StageObserver(self._synchronizer, self._by_stages, num_microbatches)

    @contextmanager
    def step(self, *, synchronize: bool) -> Iterator[None]:
        """Around the schedule of one batch; a batch that only accumulates reduces nothing."""
        if self._synchronizer is None:
            yield
            return
        with nullcontext() if synchronize else self._synchronizer.no_sync():
            yield

    def finish(self, window: WeightWindow) -> None:
        """Reduce the gradients of one accumulation window; collective."""
        if self._synchronizer is not None:
            self._synchronizer.finish()
            self._synchronizer.wait()
        if window.used:
            self._scale(self._window_scale(window))

    def abandon(self) -> None:
        """Drop a batch that failed on all ranks, with what is on its way; collective, so that nothing stays posted."""
        if self._synchronizer is not None:
            self._synchronizer.abandon()

    def lower_gradients(self) -> None:
        """Give the optimizer gradients in the element type of its parameters."""
        if self._synchronizer is not None:
            self._synchronizer.lower_gradients()

    def close(self) -> None:
        """Free the buffers."""
        if self._synchronizer is not None:
            self._synchronizer.unbind()
            self._synchronizer = None

    def _window_scale(self, window: WeightWindow) -> float:
        """From the average over replicas to the sum divided by all weights."""
        if self._replicas is None:
            return window.close(window.total)
        pooled = torch.tensor(window.total, dtype=torch.float64)
        return window.close(_pool(pooled, self._replicas)) * dist.get_world_size(self._replicas)

    def _scale(self, factor: float) -> None:
        if self._synchronizer is not None:
            self._synchronizer.scale_gradients(factor)
            return
        scale_gradients(self._parameters.values(), factor)


def _pool(value: Tensor, group: ProcessGroup) -> float:
    carried = value.cuda() if dist.get_backend(group) == "nccl" else value
    dist.all_reduce(carried, group=group)
    return float(carried)
