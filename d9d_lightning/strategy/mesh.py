"""Axes of the device mesh, and which process of a pipeline plays which pipeline rank.

The mesh order is pipeline, data, tensor, with pipeline outermost. The process with the lowest global rank of every
pipeline owns the loss, because that is where loggers, progress bars and ``is_global_zero`` live.
"""

from __future__ import annotations

from dataclasses import dataclass

from d9d_lightning.errors import PipelineConfigurationError

__all__ = ["AXIS_NAMES", "AxisSizes", "Position", "process_of_rank", "rank_of_process", "resolve_axes"]

AXIS_NAMES = ("pipeline_parallel", "data_parallel", "tensor_parallel")


@dataclass(frozen=True)
class AxisSizes:
    """Number of processes along each axis."""

    pipeline: int
    data: int
    tensor: int

    @property
    def world(self) -> int:
        """Number of processes in all."""
        return self.pipeline * self.data * self.tensor

    def position(self, global_rank: int) -> Position:
        """Coordinates of a process."""
        rest, tensor = divmod(global_rank, self.tensor)
        pipeline, data = divmod(rest, self.data)
        return Position(pipeline, data, tensor)

    def global_rank(self, position: Position) -> int:
        """Inverse of :meth:`position`."""
        return (position.pipeline * self.data + position.data) * self.tensor + position.tensor


@dataclass(frozen=True)
class Position:
    """Coordinates of one process on the mesh."""

    pipeline: int
    data: int
    tensor: int


def resolve_axes(
    world_size: int, pipeline_parallel_size: int | str, data_parallel_size: int, tensor_parallel_size: int
) -> AxisSizes:
    """Sizes of all axes, with ``"auto"`` meaning every process that the other axes leave over.

    Raises:
        PipelineConfigurationError: The sizes do not multiply to the number of processes.
    """
    others = data_parallel_size * tensor_parallel_size
    if world_size % others:
        raise PipelineConfigurationError(
            f"{world_size} processes cannot be divided by data_parallel_size={data_parallel_size} x "
            f"tensor_parallel_size={tensor_parallel_size} = {others}. Expected a multiple of {others}: "
            f"type Trainer(devices={others * max(1, world_size // others)}), or choose sizes that divide {world_size}."
        )
    if pipeline_parallel_size == "auto":
        return AxisSizes(world_size // others, data_parallel_size, tensor_parallel_size)
    sizes = AxisSizes(int(pipeline_parallel_size), data_parallel_size, tensor_parallel_size)
    if sizes.world != world_size:
        raise PipelineConfigurationError(
            f"pipeline_parallel_size={sizes.pipeline} x data_parallel_size={sizes.data} x "
            f"tensor_parallel_size={sizes.tensor} = {sizes.world} processes, but the Trainer started {world_size}. "
            f"Type Trainer(devices={sizes.world}), or leave pipeline_parallel_size='auto'."
        )
    return sizes


def rank_of_process(process: int, size: int, loss_owner: int) -> int:
    """Pipeline rank that the ``process``-th process of a pipeline plays, so that process 0 plays the loss owner.

    >>> [rank_of_process(i, 4, loss_owner=3) for i in range(4)]
    [3, 2, 1, 0]
    """
    return process if loss_owner == 0 else (loss_owner - process) % size


def process_of_rank(rank: int, size: int, loss_owner: int) -> int:
    """Inverse of :func:`rank_of_process`, which is its own inverse."""
    return rank_of_process(rank, size, loss_owner)
