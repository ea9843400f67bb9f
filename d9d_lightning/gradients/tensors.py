"""The few facts about plain tensors and DTensors that buckets and norms both need."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Placement

__all__: list[str] = []


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a tensor that lives on this rank, sharing its memory; the tensor itself if it is plain."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local()
    return tensor


def local_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """This rank's part of ``parameter.grad``, laid out like the parameter; None if there is no gradient."""
    gradient = parameter.grad
    if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
        if gradient.placements != parameter.placements:
            # A pure DTensor program leaves partial sums; only their redistribution is the gradient.
            with torch.no_grad():
                gradient = gradient.redistribute(gradient.device_mesh, parameter.placements)
        return local_tensor(gradient)
    return gradient


def stored_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The numbers that this rank stores of ``parameter.grad``, sharing its memory; None if there is no gradient.

    A sparse gradient is coalesced for that, so that each of its elements is one number.
    """
    gradient = local_gradient(parameter)
    if gradient is None or gradient.layout is not torch.sparse_coo:
        return gradient
    if not gradient.is_coalesced():
        parameter.grad = gradient = gradient.coalesce()
    return gradient._values()


def wrap_like(local: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A local tensor as what ``parameter.grad`` must be: a DTensor with the parameter's placements, or itself."""
    if not isinstance(parameter, DTensor):
        return local
    with torch.no_grad():
        return cast(
            torch.Tensor,
            DTensor.from_local(
                local,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            ),
        )


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides for a gradient of this tensor: its own where they cover memory without gaps, else contiguous ones.

    Optimizers fall back to slow kernels when a gradient is laid out differently from its parameter.
    """
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return torch.empty(tensor.shape, device="meta").stride()
        expected *= size
    return tensor.stride()


def is_sharded(placement: Placement) -> bool:
    """Whether each rank of the axis holds its own part of the tensor."""
    # Two-dimensional sharding yields a placement that torch keeps private and does not derive from Shard.
    return placement.is_shard() or type(placement).__name__ == "_StridedShard"


def group_ranks(group: dist.ProcessGroup) -> tuple[int, ...]:
    """Global ranks of a group."""
    return tuple(dist.get_process_group_ranks(group))
