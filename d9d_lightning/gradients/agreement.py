"""What replicas have to agree on before their collectives can match: the parameters, and the order of launches."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from d9d_lightning.errors import GradientSyncError
from d9d_lightning.gradients.plan import ReduceAxis

__all__: list[str] = []


def compare_replicas(axes: Sequence[ReduceAxis], named: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Raise on every rank if the replicas of a group do not hold the same parameters. Collective.

    Args:
        axes: Groups of replicas.
        named: This rank's parameters.

    Raises:
        GradientSyncError: Naming the first difference to the group's first rank that differs from another.
    """
    lines = [
        f"{name}: shape {tuple(parameter.shape)}, {parameter.dtype}, requires_grad={parameter.requires_grad}"
        for name, parameter in named
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    for axis in axes:
        if axis.size == 1:
            continue
        digests: list[str] = [""] * axis.size
        dist.all_gather_object(digests, digest, group=axis.group)
        if len(set(digests)) == 1:
            continue
        tables: list[list[str]] = [[]] * axis.size
        dist.all_gather_object(tables, lines, group=axis.group)
        other = next(rank for rank in range(axis.size) if digests[rank] != digests[0])
        position, left, right = _first_difference(tables[0], tables[other])
        raise GradientSyncError(
            f"replicas 0 and {other} do not have the same parameters, so their gradients cannot be averaged; the "
            f"first difference is parameter {position}: {left!r} on replica 0, {right!r} on replica {other}. Build the "
            "module and freeze its parameters in the same way on every rank"
        )


def agree_on_order(order: Sequence[int], axis: ReduceAxis) -> list[int]:
    """The first replica's order, on every replica. Collective."""
    shared: list[list[int]] = [list(order)]
    dist.broadcast_object_list(shared, group=axis.group, group_src=0)
    return shared[0]


def _first_difference(left: Sequence[str], right: Sequence[str]) -> tuple[int, str, str]:
    for position in range(max(len(left), len(right))):
        mine = left[position] if position < len(left) else "nothing"
        theirs = right[position] if position < len(right) else "nothing"
        if mine != theirs:
            return position, mine, theirs
    return len(left), "nothing", "nothing"
