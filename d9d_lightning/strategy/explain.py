"""How a module would be cut, without any process: units, stages, costs, what crosses boundaries."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from d9d_lightning.errors import PipelineConfigurationError
from d9d_lightning.partition.plan import make_plan
from d9d_lightning.runtime.pipeline import Pipeline
from d9d_lightning.strategy.engine import BatchPosition, find_sinks, split_batch
from d9d_lightning.strategy.metrics import metric_objects
from d9d_lightning.strategy.options import StrategyOptions
from d9d_lightning.strategy.programs import Programs
from d9d_lightning.values import Microbatch, Placement, Plan

__all__ = ["explain"]

MEGABYTE = 2**20


def explain(options: StrategyOptions, module: nn.Module, batch: Any, ranks: int, step_name: str) -> str:
    """A table of stages, followed by what crosses each boundary and the predicted bubble.

    Args:
        options: Arguments of the strategy.
        module: The user's module; left as it is.
        batch: A batch as the loader gives it.
        ranks: Number of pipeline ranks.
        step_name: The step to look at.

    Raises:
        PipelineConfigurationError: The module has no such step.
    """
    user_step = getattr(module, step_name, None)
    if not callable(user_step):
        raise PipelineConfigurationError(f"{type(module).__name__} has no {step_name}; name one of its steps")
    programs = Programs(options.schedule, ranks)
    count = options.num_microbatches
    wanted = programs.choose_num_microbatches if isinstance(count, str) else (lambda size: count)
    names = user_step.__code__.co_varnames[1 : user_step.__code__.co_argcount]
    args = (batch, *([0] if len(names) > 1 else []))
    microbatches = split_batch(args, wanted, spec=options.batch_spec, position=BatchPosition(0, 0, 0, 0, 0))
    engine = Pipeline(
        module,
        stage_to_rank=programs.stage_to_rank,
        rank=0,
        size=1,
        units=options.units,
        split_points=options.split_points,
        sinks=find_sinks(module),
        silenced=metric_objects(module),
    )

    def step(microbatch: Microbatch) -> Any:
        return user_step(*microbatch.args, **microbatch.kwargs)

    placement = engine.place(step, microbatches)
    plan = make_plan(module, engine.planner.units, engine.planner.setup_trace, placement)
    lines = _stage_lines(module, placement, plan, programs)
    bubble = programs.predicted_bubble(len(microbatches))
    lines.append(f"{len(microbatches)} microbatches of {microbatches[0].size}, predicted bubble {bubble:.0%}")
    lines += engine.planner.notes
    return "\n".join(lines)


def _stage_lines(module: nn.Module, placement: Placement, plan: Plan, programs: Programs) -> list[str]:
    parameters = dict(module.named_parameters())
    lines = []
    for stage in range(placement.num_stages):
        units = [unit for unit, home in placement.unit_stage.items() if home == stage]
        held = sum(
            p.numel() * p.element_size() for n, p in parameters.items() if any(n.startswith(f"{u}.") for u in units)
        )
        flops = sum(call.flops for call in plan.trace.calls if call.unit in units)
        sent = sum(
            math.prod(plan.spec(value).shape) * plan.spec(value).dtype.itemsize
            for value in plan.boundaries[stage].sends
        )
        lines.append(
            f"stage {stage} on rank {programs.stage_to_rank[stage]}: {', '.join(units) or '(relays)'}; "
            f"{held / MEGABYTE:.2f} MB of parameters, {flops / 1e6:.1f} MFLOP and {sent / MEGABYTE:.3f} MB sent on per "
            "microbatch"
        )
    for name, stages in plan.shared.items():
        lines.append(f"shared: {name} on stages {', '.join(map(str, stages))}")
    return lines
