"""What Lightning asks of a strategy between processes: reduce, gather, broadcast, barrier, decide."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_lightning.strategy.compat import gather_over, reduce_over
from d9d_lightning.strategy.world import World

__all__ = ["Collectives"]


class Collectives:
    """Collectives over the right processes.

    What a user reduces or gathers belongs to replicas: ranks of one pipeline hold the same value, and not all of them
    may be there. Barriers, broadcasts and decisions are for all processes.

    Args:
        world: The processes.
        device: Device of this process.
    """

    def __init__(self, world: World, device: torch.device) -> None:
        self._world = world
        self._device = device
        self.closed = False

    @property
    def _alone(self) -> bool:
        return self.closed or self._world.groups is None

    def _group(self, group: Any) -> Any:
        if group is not None and group is not dist.group.WORLD:
            return group
        return self._world.groups.data_metrics if self._world.groups is not None else None

    def _spans_one(self, group: Any) -> bool:
        return self._alone or (group in (None, dist.group.WORLD) and self._world.axes.data == 1)

    def reduce(self, value: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce over replicas; a value of a single replica is returned as it is."""
        if not isinstance(value, Tensor) or self._spans_one(group):
            return value
        return reduce_over(value, self._group(group), reduce_op=reduce_op)

    def all_gather(self, value: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather over replicas; a value of a single replica gets no new dim, as Lightning does on one device."""
        if self._spans_one(group):
            return value
        return gather_over(value, group=self._group(group), sync_grads=sync_grads)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The value of one process, on all processes of the world."""
        if self._alone:
            return value
        box = [value]
        dist.broadcast_object_list(box, source, group=dist.group.WORLD)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """The value of every process of the world, in order of ranks."""
        if self._alone or self._world.groups is None:
            return [value]
        found: list[Any] = [None] * self._world.axes.world
        dist.all_gather_object(found, value, group=self._world.groups.world_control)
        return found

    def barrier(self) -> None:
        """Wait for all processes of the world."""
        if self._alone:
            return
        if dist.get_backend() == "nccl":
            dist.barrier(device_ids=[self._device.index])
        else:
            dist.barrier()

    def decide(self, decision: bool, every: bool) -> bool:
        """Whether all processes, or any of them, decided so."""
        if self._alone:
            return decision
        votes = torch.tensor(int(decision), device=self._device)
        dist.all_reduce(votes, group=dist.group.WORLD)
        return bool(votes == dist.get_world_size()) if every else bool(votes)
