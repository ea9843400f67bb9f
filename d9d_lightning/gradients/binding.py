"""Turn parameters into buckets: who is reduced over what, with whom, in which order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from d9d_lightning.gradients.bucket import AbstractGradientBucket, LocalGradientBucket, SyncGradientBucket
from d9d_lightning.gradients.plan import BucketKey, ReduceAxis, fill_buckets, find_reduce_axes
from d9d_lightning.gradients.reduction import Communicator
from d9d_lightning.gradients.slot import GradientSlot
from d9d_lightning.gradients.tensors import local_tensor

__all__: list[str] = []

_FIRST_BUCKET_BYTES = 1024 * 1024
_SHARED_GROUP = -1


@dataclass(frozen=True)
class NamedParameter:
    """One parameter of one optimizer group."""

    group_index: int
    name: str
    parameter: torch.Tensor


@dataclass(frozen=True)
class BucketRules:
    """What decides how parameters are put into buckets.

    Attributes:
        plain_axes: Axes over which plain parameters are averaged; None if the caller gave none.
        shared: Parameters owned by other ranks too, with the group of their owners, in an order equal on all owners.
        limit_bytes: Size of a bucket.
        gradient_dtype: Element type of the gradients of floating point parameters; None: the parameter's own choice.
        communicator: Starts the reductions.
    """

    plain_axes: tuple[ReduceAxis, ...] | None
    shared: Mapping[torch.Tensor, dist.ProcessGroup]
    limit_bytes: int
    gradient_dtype: torch.dtype | None
    communicator: Communicator

    def gradient_dtype_of(self, parameter: torch.Tensor) -> torch.dtype | None:
        """Element type in which gradients of a parameter are accumulated."""
        if self.gradient_dtype is not None and parameter.is_floating_point():
            return self.gradient_dtype
        return parameter.grad_dtype


def build_buckets(entries: Sequence[NamedParameter], rules: BucketRules) -> list[AbstractGradientBucket]:
    """Buckets for the given parameters, not yet bound, in launch order.

    Shared parameters come last: their owners have different buckets before, and only an order that is the same for all
    ranks of all groups cannot deadlock where reductions of one rank run one after the other.

    Args:
        entries: The parameters, in the caller's order.
        rules: How to group them.

    Returns:
        The buckets.

    Raises:
        TypeError: If a plain parameter has no axes.
        ValueError: If a placement is not supported.
    """
    position = {parameter: index for index, parameter in enumerate(rules.shared)}
    own = [entry for entry in entries if entry.parameter not in position]
    shared = [entry for entry in entries if entry.parameter in position]
    # Buckets are filled from the end, and every owner has to fill them alike.
    shared.sort(key=lambda entry: position[entry.parameter], reverse=True)
    return [*_fill(own, rules), *_fill(shared, rules)]


def _fill(entries: Sequence[NamedParameter], rules: BucketRules) -> list[AbstractGradientBucket]:
    slots, keys, sizes = [], [], []
    for entry in entries:
        dtype = rules.gradient_dtype_of(entry.parameter)
        axes = find_reduce_axes(entry.name, entry.parameter, rules.plain_axes)
        group_index = entry.group_index
        if entry.parameter in rules.shared:
            # Owners may keep it in different optimizer groups.
            group_index = _SHARED_GROUP
            axes = (ReduceAxis(rules.shared[entry.parameter], average=False), *axes)
        if axes and dtype is None:
            raise ValueError(
                f"{entry.name} has grad_dtype None, so a buffer for its gradient has no element type; set "
                "parameter.grad_dtype, or pass gradient_dtype= to the synchronizer"
            )
        local = local_tensor(entry.parameter)
        slots.append(GradientSlot(entry.name, entry.parameter, dtype))
        keys.append(BucketKey(group_index, axes, local.device, dtype))
        # Gradients without a buffer are never sent, so nothing limits how many of them go together.
        sizes.append(local.numel() * dtype.itemsize if axes and dtype is not None else 0)
    buckets: list[AbstractGradientBucket] = []
    for indices in fill_buckets(keys, sizes, rules.limit_bytes, _FIRST_BUCKET_BYTES):
        members = [slots[index] for index in indices]
        axes = keys[indices[0]].axes
        if axes:
            buckets.append(SyncGradientBucket(members, axes, rules.communicator))
        else:
            buckets.append(LocalGradientBucket(members))
    return buckets


def without_repeats(groups: Iterable[Iterable[tuple[str, torch.Tensor]]]) -> list[NamedParameter]:
    """Parameters of all groups; one that occurs again, in the same or another group, is left out there."""
    found: dict[torch.Tensor, NamedParameter] = {}
    for index, group in enumerate(groups):
        for name, parameter in group:
            found.setdefault(parameter, NamedParameter(index, name, parameter))
    return list(found.values())
