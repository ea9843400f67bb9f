"""The processes of a run: the world, its mesh, its groups, and this process's place among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from d9d_lightning.strategy.compat import default_backend_for, init_process_group
from d9d_lightning.strategy.groups import StrategyGroups, create_groups
from d9d_lightning.strategy.mesh import AXIS_NAMES, AxisSizes, Position, process_of_rank, rank_of_process, resolve_axes
from d9d_lightning.strategy.options import StrategyOptions

__all__ = ["World", "join_world", "leave_world", "next_number"]


@dataclass(frozen=True)
class World:
    """This process and the others.

    Attributes:
        axes: Sizes of the mesh.
        position: Where this process stands.
        mesh: Axes ``pipeline_parallel``, ``data_parallel``, ``tensor_parallel``.
        groups: Process groups; None where one process runs alone.
        is_temporary: The default process group was made for this run only, and ends with it.
    """

    axes: AxisSizes
    position: Position
    mesh: DeviceMesh
    groups: StrategyGroups | None
    is_temporary: bool

    def pipeline_rank(self, loss_owner: int) -> int:
        """Pipeline rank of this process, given which rank owns the loss."""
        return rank_of_process(self.position.pipeline, self.axes.pipeline, loss_owner)

    def process_of(self, rank: int, loss_owner: int) -> int:
        """Global rank of a pipeline rank of this pipeline."""
        process = process_of_rank(rank, self.axes.pipeline, loss_owner)
        return self.axes.global_rank(Position(process, self.position.data, self.position.tensor))


def join_world(
    options: StrategyOptions, environment: ClusterEnvironment, device: torch.device, known: World | None
) -> World:
    """Connect the processes, make the mesh and all groups; collective the first time, free afterwards.

    Args:
        options: Arguments of the strategy.
        environment: Says how many processes there are and which one this is.
        device: Device of this process.
        known: What an earlier run of the same strategy made.

    Raises:
        PipelineConfigurationError: The number of processes does not fit the axes; before any communication.
    """
    size = environment.world_size()
    axes = resolve_axes(size, options.pipeline_parallel_size, options.data_parallel_size, options.tensor_parallel_size)
    if known is not None and not known.is_temporary and dist.is_initialized():
        return known
    backend = options.process_group_backend or default_backend_for(device)
    fresh = not dist.is_initialized()
    if fresh and size == 1:
        # nobody else to find: no port, nothing in the environment
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    elif fresh:
        init_process_group(environment, backend, timeout=options.timeout)
    rank = dist.get_rank()
    mesh = init_device_mesh(device.type, (axes.pipeline, axes.data, axes.tensor), mesh_dim_names=AXIS_NAMES)
    groups = create_groups(axes, rank, backend, options.timeout) if size > 1 else None
    return World(axes, axes.position(rank), mesh, groups, is_temporary=fresh and size == 1)


def next_number(world: World, kind: str) -> int:
    """A number that rises by one with every call and is equal on all ranks that call equally often.

    It is counted in the store of the process group, because processes need not be equally old.
    """
    if world.axes.world == 1:
        return 0
    store: Any = dist.distributed_c10d._get_default_store()
    return int(store.add(f"d9d_number/{kind}/{dist.get_rank()}", 1))


def leave_world(world: World | None) -> None:
    """End a world that was made for one process alone, so that a later trainer can start several."""
    if world is not None and world.is_temporary and dist.is_initialized():
        dist.destroy_process_group()
