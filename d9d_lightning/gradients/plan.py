"""Which parameters share a bucket, and over which process groups a bucket is reduced. Pure but for mesh look-ups."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from d9d_lightning.gradients.tensors import group_ranks, is_sharded

__all__ = ["MeshLike", "ReduceAxis", "fill_buckets", "find_reduce_axes", "mesh_axes"]

MeshLike = DeviceMesh | dist.ProcessGroup | Sequence[dist.ProcessGroup]
"""What gradients of plain parameters are averaged over: every axis of a mesh, one group, or several in turn."""


@dataclass(frozen=True)
class ReduceAxis:
    """One all-reduce of a bucket.

    Attributes:
        group: The ranks that take part.
        average: Whether the result is their average; otherwise their sum.
    """

    group: dist.ProcessGroup
    average: bool = True

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size()


@dataclass(frozen=True)
class BucketKey:
    """Parameters with equal keys may share a bucket."""

    group_index: int
    axes: tuple[ReduceAxis, ...]
    device: torch.device
    dtype: torch.dtype | None


def mesh_axes(mesh: MeshLike) -> tuple[ReduceAxis, ...]:
    """Axes of a mesh, of a group, or of several groups; those of one rank stay in, so that they can be compared."""
    if isinstance(mesh, DeviceMesh):
        return tuple(ReduceAxis(mesh.get_group(dim)) for dim in range(mesh.ndim))
    if isinstance(mesh, dist.ProcessGroup):
        return (ReduceAxis(mesh),)
    return tuple(ReduceAxis(group) for group in mesh)


def find_reduce_axes(
    name: str, parameter: torch.Tensor, plain_axes: tuple[ReduceAxis, ...] | None
) -> tuple[ReduceAxis, ...]:
    """Groups over which the gradient of one parameter is averaged, innermost axis first.

    A DTensor is averaged over its ``Replicate`` axes, and over those of ``plain_axes`` that its own mesh does not have:
    a parameter sharded over tensor-parallel ranks still has replicas on the data-parallel axis.

    Args:
        name: The parameter's name, for errors.
        parameter: The parameter.
        plain_axes: Axes given to ``bind``; None if none were given.

    Returns:
        Axes of more than one rank.

    Raises:
        TypeError: If the parameter is plain and no axes were given.
        ValueError: If a placement is neither ``Replicate`` nor ``Shard``.
    """
    if isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        axes = []
        for dim, placement in enumerate(parameter.placements):
            if isinstance(placement, Replicate):
                axes.append(ReduceAxis(mesh.get_group(dim)))
            elif not is_sharded(placement):
                raise ValueError(
                    f"{name} has placement {placement} on mesh axis {dim}; gradients can be synchronized for Replicate "
                    "and Shard only: redistribute the parameter before bind()"
                )
        known = {group_ranks(mesh.get_group(dim)) for dim in range(mesh.ndim)}
        axes += [axis for axis in plain_axes or () if group_ranks(axis.group) not in known]
    elif plain_axes is None:
        raise TypeError(
            f"{name} is a plain {type(parameter).__name__}, not a DTensor, so nothing says which ranks hold its "
            "replicas; call bind(mesh=...) with the data-parallel mesh or group, or bind(mesh=()) if it has none"
        )
    else:
        axes = list(plain_axes)
    return tuple(axis for axis in reversed(axes) if axis.size > 1)


def fill_buckets(
    keys: Sequence[Hashable], sizes: Sequence[int], limit_bytes: int, first_limit_bytes: int
) -> list[tuple[int, ...]]:
    """Put entries into buckets, last entry first, because backward reaches the last parameters first.

    Args:
        keys: For each entry, what it must have in common with the rest of its bucket.
        sizes: Bytes of each entry.
        limit_bytes: A bucket is closed before it would exceed this; a larger entry gets a bucket of its own.
        first_limit_bytes: The first bucket of each key is closed as soon as it has reached this: small, so that
            communication starts early, but not so strict that a few biases before a large weight travel alone.

    Returns:
        Indices of each bucket's entries, in the order in which backward is expected to complete the buckets.
    """
    closed: list[tuple[int, ...]] = []
    opened: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    begun: set[Hashable] = set()
    for index in reversed(range(len(keys))):
        key = keys[index]
        if key in opened:
            first_is_full = key not in begun and filled[key] >= first_limit_bytes
            if first_is_full or filled[key] + sizes[index] > limit_bytes:
                closed.append(tuple(opened.pop(key)))
                begun.add(key)
        if key not in opened:
            opened[key] = []
            filled[key] = 0
        opened[key].append(index)
        filled[key] += sizes[index]
    closed += [tuple(indices) for indices in opened.values()]
    # A bucket is complete when its earliest parameter is.
    return sorted(closed, key=min, reverse=True)


def read_group(group: object, index: int) -> list[tuple[str, torch.Tensor]]:
    """Name and parameter of each entry of one group.

    Args:
        group: Parameters, ``(name, parameter)`` pairs, or an optimizer's group dictionary.
        index: Position of the group, for the names of nameless parameters.

    Raises:
        TypeError: If an entry is neither a parameter nor a pair.
    """
    names: Sequence[str] | None = None
    entries = group
    if isinstance(group, Mapping):
        entries, names = group["params"], group.get("param_names")
    if isinstance(entries, torch.Tensor) or not hasattr(entries, "__iter__"):
        raise TypeError(
            f"parameter group {index} is a {type(entries).__name__}; give a list of groups, each a list of parameters "
            "or of (name, parameter) pairs: GradientSynchronizer([list(module.named_parameters())], ...)"
        )
    named = []
    for position, entry in enumerate(entries):
        name, parameter = entry if isinstance(entry, tuple) else (None, entry)
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(
                f"entry {position} of parameter group {index} is a {type(parameter).__name__}, no parameter"
            )
        if name is None and names is not None:
            name = names[position]
        named.append((name or f"parameter {position} of group {index} {tuple(parameter.shape)}", parameter))
    return named
