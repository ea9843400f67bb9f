"""The process groups of one pipeline, as the runtime uses them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["PipelineGroups", "maximum_over"]


@dataclass(frozen=True)
class PipelineGroups:
    """Groups that hold exactly the ranks of one pipeline.

    Attributes:
        forward: Point-to-point messages of the forward pass.
        backward: Point-to-point messages of the backward pass.
        control: Status and plans; always gloo.
        lockstep: Broadcasts of unit outputs.
        process_of: For each pipeline rank, its rank within the groups.
        everyone: The ranks of all replicas of the pipeline, for their agreement on failures; gloo. None where there is
            one pipeline.
    """

    forward: dist.ProcessGroup
    backward: dist.ProcessGroup
    control: dist.ProcessGroup
    lockstep: dist.ProcessGroup
    process_of: tuple[int, ...]
    everyone: dist.ProcessGroup | None = None

    def gather(self, value: Any) -> list[Any]:
        """The value of every pipeline rank, in order of pipeline ranks, on every rank."""
        found: list[Any] = [None] * len(self.process_of)
        dist.all_gather_object(found, value, group=self.control)
        return [found[process] for process in self.process_of]

    def broadcast(self, value: Any, source: int, lockstep: bool = False) -> Any:
        """The value of one pipeline rank, on every rank."""
        group = self.lockstep if lockstep else self.control
        box = [value]
        dist.broadcast_object_list(box, dist.get_global_rank(group, self.process_of[source]), group=group)
        return box[0]

    def maximum(self, numbers: list[int]) -> list[int]:
        """The largest of each number over all ranks."""
        return maximum_over(numbers, self.control)


def maximum_over(numbers: list[int], group: dist.ProcessGroup) -> list[int]:
    """The largest of each number over all ranks of a gloo group."""
    tensor = torch.tensor(numbers, dtype=torch.int64)
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    group.allreduce([tensor], options).wait()  # twice a step: the public function costs as much again
    return tensor.tolist()
