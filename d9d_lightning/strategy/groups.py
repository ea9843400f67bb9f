"""Every process group of the strategy, created once, in one fixed order, by all processes.

Creation is collective over the world, so it happens at one place only. Later fits reuse what is here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import product

import torch.distributed as dist
from torch.distributed import ProcessGroup

from d9d_lightning.strategy.mesh import AxisSizes, Position

__all__ = ["StrategyGroups", "create_groups"]

PIPELINE_KINDS = ("pipeline_forward", "pipeline_backward", "pipeline_control", "pipeline_lockstep")
DATA_KINDS = ("data_gradients", "data_metrics")
GLOO_KINDS = ("pipeline_control", "world_control")


@dataclass(frozen=True)
class StrategyGroups:
    """The groups that this process belongs to.

    Attributes:
        pipeline_forward: Point-to-point messages of the forward pass.
        pipeline_backward: Point-to-point messages of the backward pass.
        pipeline_control: Status, logs, fingerprints; always gloo, so that it never waits for a device.
        pipeline_lockstep: Broadcasts of unit outputs in lockstep mode.
        data_gradients: Gradient reduction over replicas of this stage.
        data_metrics: ``sync_dist`` and torchmetrics over replicas.
        world_control: All processes; always gloo. Ends loaders together.
        processes: Global ranks of this pipeline, lowest first.
        replicas: Global ranks that hold the same stages, lowest first.
    """

    pipeline_forward: ProcessGroup
    pipeline_backward: ProcessGroup
    pipeline_control: ProcessGroup
    pipeline_lockstep: ProcessGroup
    data_gradients: ProcessGroup
    data_metrics: ProcessGroup
    world_control: ProcessGroup
    processes: tuple[int, ...]
    replicas: tuple[int, ...]


def create_groups(axes: AxisSizes, global_rank: int, backend: str, timeout: timedelta) -> StrategyGroups:
    """Create every group of every process; collective over the world.

    Args:
        axes: Sizes of the mesh.
        global_rank: This process.
        backend: Backend of all groups except the control group.
        timeout: How long a collective may wait.
    """
    here = axes.position(global_rank)
    own: dict[str, ProcessGroup] = {}

    def create(kind: str, members: list[int]) -> None:
        chosen = "gloo" if kind in GLOO_KINDS else backend
        group = dist.new_group(members, timeout=timeout, backend=chosen, group_desc=f"d9d_{kind}")
        if global_rank in members:
            own[kind] = group

    for kind in PIPELINE_KINDS:
        for data, tensor in product(range(axes.data), range(axes.tensor)):
            create(kind, _pipeline_members(axes, data, tensor))
    for kind in DATA_KINDS:
        for pipeline, tensor in product(range(axes.pipeline), range(axes.tensor)):
            create(kind, _data_members(axes, pipeline, tensor))
    create("world_control", list(range(axes.world)))
    return StrategyGroups(
        **own,
        processes=tuple(_pipeline_members(axes, here.data, here.tensor)),
        replicas=tuple(_data_members(axes, here.pipeline, here.tensor)),
    )


def _members(axes: AxisSizes, place: Callable[[int], Position], count: int) -> list[int]:
    return sorted(axes.global_rank(place(index)) for index in range(count))


def _pipeline_members(axes: AxisSizes, data: int, tensor: int) -> list[int]:
    return _members(axes, lambda pipeline: Position(pipeline, data, tensor), axes.pipeline)


def _data_members(axes: AxisSizes, pipeline: int, tensor: int) -> list[int]:
    return _members(axes, lambda data: Position(pipeline, data, tensor), axes.data)
