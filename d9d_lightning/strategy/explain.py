"""How a module would be cut, without any process: units, stages, costs, what crosses boundaries, for each schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from d9d_lightning.errors import PartitionError, PipelineConfigurationError, ScheduleError
from d9d_lightning.partition.placement import place_units
from d9d_lightning.partition.plan import make_plan, parameter_stages
from d9d_lightning.partition.saved import SavedBytes
from d9d_lightning.runtime.pipeline import Pipeline
from d9d_lightning.schedule import Costs, build_program, simulate
from d9d_lightning.strategy.compat import is_param_in_hook_signature
from d9d_lightning.strategy.engine import BatchPosition, find_sinks, split_batch
from d9d_lightning.strategy.metrics import metric_objects
from d9d_lightning.strategy.options import StrategyOptions
from d9d_lightning.strategy.outlook import Outlook, ScheduleOutlook, StageOutlook, write_picture
from d9d_lightning.strategy.programs import Programs, schedule_names
from d9d_lightning.values import Microbatch, Plan

__all__ = ["Explained", "look_ahead"]


class Explained:
    """What a strategy can say of a module before it runs."""

    options: StrategyOptions

    def explain(
        self,
        module: nn.Module,
        batch: Any,
        *,
        ranks: int,
        step: str = "training_step",
        schedules: Iterable[str] | None = None,
        picture: str | Path | None = None,
    ) -> str:
        """How a module would be cut, without starting any process, and how each schedule would do.

        Args:
            module: The module; left as it is.
            batch: A batch as the loader gives it.
            ranks: Number of pipeline ranks.
            step: The step to look at.
            schedules: Names of schedules to compare with this strategy's; by default all, ``[]`` for none.
            picture: Where to draw this strategy's timeline: a ``.png``, ``.svg`` or ``.html`` file.

        Raises:
            PipelineConfigurationError: The module has no such step, or there is no such schedule or kind of picture.
            PartitionError: The step cannot be cut.
        """
        outlook = look_ahead(self.options, module, batch, ranks, step, schedules)
        if picture is not None:
            write_picture(outlook.simulation, picture)
        return outlook.text()


def look_ahead(
    options: StrategyOptions,
    module: nn.Module,
    batch: Any,
    ranks: int,
    step_name: str,
    schedules: Iterable[str] | None = None,
) -> Outlook:
    """Place the module as each schedule would, and clock its program by the operations of the stages.

    Args:
        options: Arguments of the strategy.
        module: The user's module; left as it is.
        batch: A batch as the loader gives it.
        ranks: Number of pipeline ranks.
        step_name: The step to look at.
        schedules: Names of the schedules to compare with the chosen one; by default all.

    Raises:
        PipelineConfigurationError: The module has no such step, or there is no such schedule.
        PartitionError: The step cannot be cut.
    """
    user_step = getattr(module, step_name, None)
    if not callable(user_step):
        raise PipelineConfigurationError(f"{type(module).__name__} has no {step_name}; name one of its steps")
    programs = Programs(options.schedule, ranks)
    args = (batch, *([0] if is_param_in_hook_signature(user_step, "batch_idx", min_args=2) else []))
    count = options.num_microbatches
    wanted = programs.choose_num_microbatches if isinstance(count, str) else (lambda size: count)
    microbatches = split_batch(args, wanted, spec=options.batch_spec, position=BatchPosition(0, 0, 0, 0, 0))

    def step(microbatch: Microbatch) -> Any:
        return user_step(*microbatch.args, **microbatch.kwargs)

    cutter = _Cutter(options, module, step, microbatches[0])
    cut = cutter.cut(programs.stage_to_rank)
    name = options.schedule if isinstance(options.schedule, str) else type(options.schedule).__name__
    seen = [_clock(name, programs, cut, len(microbatches))]
    for other in _known(schedule_names() if schedules is None else schedules):
        if other != name:
            seen.append(_try(other, ranks, cutter, len(microbatches)))
    return Outlook(
        stages=cut.stages,
        shared=tuple(sorted(cut.plan.shared.items())),
        schedules=tuple(seen),
        microbatch=microbatches[0].size,
        num_microbatches=len(microbatches),
        bubble=programs.predicted_bubble(len(microbatches)),
        notes=cutter.notes,
    )


def _known(names: Iterable[str]) -> tuple[str, ...]:
    found = tuple(names)
    for name in found:
        if name not in schedule_names():
            raise PipelineConfigurationError(
                f"no schedule is called {name!r}; the schedules are {', '.join(schedule_names())}"
            )
    return found


@dataclass(frozen=True)
class _Cut:
    """A module under one placement.

    Attributes:
        plan: What crosses boundaries.
        stages: Figures of each stage.
        held: Bytes of parameters and gradients of each rank.
    """

    plan: Plan
    stages: tuple[StageOutlook, ...]
    held: tuple[int, ...]


class _Cutter:
    """Cuts a module under any placement, with one trace for each number of stages."""

    def __init__(
        self, options: StrategyOptions, module: nn.Module, step: Callable[[Microbatch], Any], microbatch: Microbatch
    ) -> None:
        self._options = options
        self._module = module
        self._step = step
        self._microbatch = microbatch
        self._traced: dict[int, tuple[Pipeline, Mapping[str, int]]] = {}
        self._cuts: dict[tuple[int, ...], _Cut] = {}

    @property
    def notes(self) -> list[str]:
        """What the traces have to say, each once."""
        return list(dict.fromkeys(note for engine, _ in self._traced.values() for note in engine.planner.notes))

    def cut(self, stage_to_rank: tuple[int, ...]) -> _Cut:
        """Stages under a placement; remembered."""
        if stage_to_rank not in self._cuts:
            self._cuts[stage_to_rank] = self._cut(stage_to_rank)
        return self._cuts[stage_to_rank]

    def _trace(self, stage_to_rank: tuple[int, ...]) -> tuple[Pipeline, Mapping[str, int]]:
        if len(stage_to_rank) not in self._traced:
            engine = Pipeline(
                self._module,
                stage_to_rank=stage_to_rank,
                rank=0,
                size=1,
                units=self._options.units,
                split_points=self._options.split_points,
                sinks=find_sinks(self._module),
                silenced=metric_objects(self._module),
            )
            saved = SavedBytes(self._module)
            engine.planner.meter = saved.measure
            engine.planner.place(self._step, self._microbatch, stage_to_rank)
            self._traced[len(stage_to_rank)] = engine, saved.of_units(engine.planner.setup_trace)
        return self._traced[len(stage_to_rank)]

    def _cut(self, stage_to_rank: tuple[int, ...]) -> _Cut:
        engine, kept = self._trace(stage_to_rank)
        units, trace = engine.planner.units, engine.planner.setup_trace
        placement = place_units(trace, units, stage_to_rank, self._options.split_points)
        plan = make_plan(self._module, units, trace, placement)
        homes = parameter_stages(self._module, units, trace, placement)
        held = [0] * (max(stage_to_rank) + 1)
        for name, parameter in self._module.named_parameters():
            size = parameter.numel() * parameter.element_size()
            for rank in {stage_to_rank[stage] for stage in homes[name]}:
                held[rank] += size * (2 if parameter.requires_grad else 1)
        stages = tuple(self._describe(plan, stage, rank, homes, kept) for stage, rank in enumerate(stage_to_rank))
        return _Cut(plan, stages, tuple(held))

    def _describe(
        self, plan: Plan, stage: int, rank: int, homes: Mapping[str, Sequence[int]], kept: Mapping[str, int]
    ) -> StageOutlook:
        own = {unit for unit, home in plan.placement.unit_stage.items() if home == stage}
        order = dict.fromkeys([*(call.unit for call in plan.trace.calls), *plan.placement.unit_stage])
        parameters = [p for name, p in self._module.named_parameters() if homes[name][0] == stage]
        return StageOutlook(
            stage=stage,
            rank=rank,
            units=tuple(unit for unit in order if unit in own),
            parameters=sum(parameter.numel() for parameter in parameters),
            parameter_bytes=sum(parameter.numel() * parameter.element_size() for parameter in parameters),
            flops=sum(call.flops for call in plan.trace.calls if call.unit in own),
            activation_bytes=sum(kept.get(unit, 0) for unit in own),
            sent_bytes=sum(
                math.prod(plan.spec(value).shape) * plan.spec(value).dtype.itemsize
                for value in plan.boundaries[stage].sends
            ),
        )


def _try(name: str, ranks: int, cutter: _Cutter, num_microbatches: int) -> ScheduleOutlook:
    programs = Programs(name, ranks)
    try:
        build_program(name, pp_size=ranks, num_microbatches=num_microbatches)
        return _clock(name, programs, cutter.cut(programs.stage_to_rank), num_microbatches)
    except (ScheduleError, PartitionError) as error:
        return ScheduleOutlook(name, programs.num_stages, problem=str(error))


def _clock(name: str, programs: Programs, cut: _Cut, num_microbatches: int) -> ScheduleOutlook:
    program = programs.training(num_microbatches)
    flops = [float(stage.flops) for stage in cut.stages]
    times = [each / max(flops) for each in flops] if any(flops) else [1.0] * len(flops)
    costs = Costs(times, times, times, activation=[float(stage.activation_bytes) for stage in cut.stages])
    simulation = simulate(program, costs, check=False)
    between = zip(cut.stages, programs.stage_to_rank[1:], strict=False)
    return ScheduleOutlook(
        name=name,
        num_stages=programs.num_stages,
        program=program,
        simulation=simulation,
        rank_bytes=tuple(held + round(peak) for held, peak in zip(cut.held, simulation.peak_activations, strict=True)),
        sent_bytes=sum(stage.sent_bytes for stage, following in between if stage.rank != following),
    )
