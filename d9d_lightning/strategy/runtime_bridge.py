"""Makes the runtime's pipeline from what the strategy knows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from lightning.pytorch import LightningModule

from d9d_lightning.runtime.groups import PipelineGroups
from d9d_lightning.runtime.pipeline import Pipeline
from d9d_lightning.strategy.engine import Sink
from d9d_lightning.strategy.mesh import process_of_rank
from d9d_lightning.strategy.metrics import metric_objects
from d9d_lightning.strategy.options import StrategyOptions
from d9d_lightning.strategy.programs import Programs
from d9d_lightning.strategy.world import World

__all__ = ["make_engine", "runtime_groups"]


def make_engine(
    module: LightningModule,
    *,
    world: World,
    programs: Programs,
    rank: int,
    options: StrategyOptions,
    sinks: Sequence[Sink],
    device: torch.device,
) -> Pipeline:
    """Pipeline of this rank, not yet placed."""
    return Pipeline(
        module,
        stage_to_rank=programs.stage_to_rank,
        rank=rank,
        size=programs.size,
        groups=runtime_groups(world, programs),
        units=options.units,
        split_points=options.split_points,
        sinks=sinks,
        silenced=metric_objects(module),
        device=device,
        recomputed=options.activation_checkpointing_policy,
    )


def runtime_groups(world: World, programs: Programs) -> PipelineGroups | None:
    """This pipeline's groups as the runtime uses them; None for one process."""
    groups = world.groups
    if groups is None or programs.size == 1:
        return None
    return PipelineGroups(
        forward=groups.pipeline_forward,
        backward=groups.pipeline_backward,
        control=groups.pipeline_control,
        lockstep=groups.pipeline_lockstep,
        process_of=tuple(process_of_rank(rank, programs.size, programs.loss_owner) for rank in range(programs.size)),
        everyone=groups.world_control if world.axes.data > 1 else None,
    )
