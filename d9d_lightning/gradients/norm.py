"""Global gradient norms and clipping, over ranks that hold different parameters.

Three kinds of ranks must be told apart. Replicas hold equal gradients after the synchronizer and are not summed over.
Ranks along a DTensor's shard axes hold parts of one gradient; the parameter says so itself. Ranks of ``groups`` hold
other parameters (stages of a pipeline); parameters that several of them own are weighted by the caller.

The partial sums are gathered and added in rank order on every rank, in float64. So the norm and the coefficient are
equal to the last bit everywhere, whatever algorithm the backend uses to reduce. The host never waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from d9d_lightning.gradients.elementwise import by_device_and_dtype, clamp_in_place, scale_in_place
from d9d_lightning.gradients.tensors import is_sharded, local_tensor, stored_gradient

__all__ = [
    "clip_gradients_by_norm",
    "clip_gradients_by_value",
    "global_gradient_norm",
    "global_parameter_norms",
    "scale_gradients",
]

_EPSILON = 1e-6


def global_gradient_norm(
    parameters: Iterable[torch.Tensor],
    *,
    groups: Sequence[dist.ProcessGroup] = (),
    norm_type: float = 2.0,
    weights: Mapping[torch.Tensor, float] | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Norm of the gradients of all ranks together. Collective over ``groups`` and the shard axes of DTensors.

    Args:
        parameters: This rank's parameters; those without a gradient count as zero. DTensor parameters sharded over a
            group must be given in the same order on its ranks.
        groups: Process groups whose ranks hold different parameters, reduced over in turn.
        norm_type: The p of the p-norm; ``math.inf`` for the largest absolute value.
        weights: How much of a parameter's p-th power this rank accounts for: 1 for its own (the default); for a shared
            one 1 on one owner and 0 on the others, or a fraction on each.
        device: Where to compute on a rank without parameters; default: where its parameters are, else the CPU.

    Returns:
        0-dim float64 tensor (float32 on devices that lack it), equal to the last bit on all ranks.

    Raises:
        ValueError: If ``norm_type`` is not positive.
    """
    if not norm_type > 0:
        raise ValueError(f"norm_type is {norm_type}; give a positive number or math.inf")
    listed = _unique(parameters)
    place = device or (local_tensor(listed[0]).device if listed else torch.device("cpu"))
    with torch.no_grad():
        total = torch.zeros((), dtype=_sum_dtype(place), device=place)
        for shard_groups, members in _by_shard_groups(listed).items():
            part = _local_power_sum(members, norm_type, weights or {}, total)
            total = _combine(torch.stack([total, _reduce_over(part, shard_groups, norm_type)]), norm_type)
        return _root(_reduce_over(total, groups, norm_type), norm_type)


def clip_gradients_by_norm(
    parameters: Iterable[torch.Tensor],
    max_norm: float,
    *,
    groups: Sequence[dist.ProcessGroup] = (),
    norm_type: float = 2.0,
    weights: Mapping[torch.Tensor, float] | None = None,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Scale all gradients of all ranks by one coefficient so that their global norm is at most ``max_norm``.

    The coefficient is ``min(1, max_norm / (norm + 1e-6))``, as in ``torch.nn.utils.clip_grad_norm_``; a norm that is
    not finite makes gradients NaN or zero on all ranks alike.

    Args:
        parameters: See :func:`global_gradient_norm`; so for the arguments not named here.
        max_norm: The limit; 0 makes all gradients zero.
        groups: Groups whose ranks hold different parameters.
        norm_type: The p of the p-norm.
        weights: Share of each parameter that this rank accounts for.
        device: Where to compute on a rank without parameters.

    Returns:
        The norm before clipping.

    Raises:
        ValueError: If ``max_norm`` is negative or NaN.
    """
    if not max_norm >= 0:
        raise ValueError(f"max_norm is {max_norm}; give a number from 0, or do not clip")
    listed = _unique(parameters)
    norm = global_gradient_norm(listed, groups=groups, norm_type=norm_type, weights=weights, device=device)
    scale_in_place(_local_gradients(listed), torch.clamp(max_norm / (norm + _EPSILON), max=1.0))
    return norm


def clip_gradients_by_value(parameters: Iterable[torch.Tensor], clip_value: float) -> None:
    """Clamp every gradient to ``[-clip_value, clip_value]``; needs no communication.

    Args:
        parameters: This rank's parameters.
        clip_value: The limit.

    Raises:
        ValueError: If it is negative or NaN.
    """
    if not clip_value >= 0:
        raise ValueError(f"clip_value is {clip_value}; give a number from 0, or do not clip")
    clamp_in_place(_local_gradients(_unique(parameters)), clip_value)


def scale_gradients(parameters: Iterable[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply every gradient in place; a 0-dim tensor keeps the host from waiting for the device."""
    scale_in_place(_local_gradients(_unique(parameters)), factor)


def global_parameter_norms(
    named_parameters: Iterable[tuple[str, torch.Tensor]],
    *,
    groups: Sequence[dist.ProcessGroup] = (),
    norm_type: float = 2.0,
) -> dict[str, float]:
    """Norm of each parameter's gradient, for all parameters of all ranks. Collective; for logging, as it reads values.

    Args:
        named_parameters: This rank's parameters under their global names. One that several ranks own is listed once.
        groups: Groups whose ranks hold different parameters.
        norm_type: The p of the p-norm.

    Returns:
        Norm by name, sorted by name, equal on all ranks; parameters without a gradient are left out.
    """
    norms: dict[str, float] = {}
    for name, parameter in named_parameters:
        # The shards of a gradient meet even where one of them has none.
        norm = global_gradient_norm([parameter], norm_type=norm_type)
        if parameter.grad is not None:
            norms[name] = norm.item()
    for group in groups:
        gathered: list[dict[str, float]] = [{}] * group.size()
        dist.all_gather_object(gathered, norms, group=group)
        norms = {name: norm for part in reversed(gathered) for name, norm in part.items()}
    return dict(sorted(norms.items()))


def _unique(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return list(dict.fromkeys([parameters] if isinstance(parameters, torch.Tensor) else parameters))


def _local_gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    found = [stored_gradient(parameter) for parameter in parameters]
    return [gradient for gradient in found if gradient is not None]


def _by_shard_groups(
    parameters: Iterable[torch.Tensor],
) -> dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]]:
    found: dict[tuple[dist.ProcessGroup, ...], list[torch.Tensor]] = {}
    for parameter in parameters:
        shard_groups: tuple[dist.ProcessGroup, ...] = ()
        if isinstance(parameter, DTensor):
            placements = enumerate(parameter.placements)
            shard_groups = tuple(parameter.device_mesh.get_group(dim) for dim, p in placements if is_sharded(p))
        found.setdefault(shard_groups, []).append(parameter)
    return found


def _local_power_sum(
    parameters: Sequence[torch.Tensor], norm_type: float, weights: Mapping[torch.Tensor, float], like: torch.Tensor
) -> torch.Tensor:
    """Sum (for inf: maximum) of the p-th powers of this rank's gradients, as a 0-dim tensor like ``like``."""
    gradients: list[torch.Tensor] = []
    shares: dict[int, float] = {}
    for parameter in parameters:
        gradient = stored_gradient(parameter)
        share = weights.get(parameter, 1.0)
        if gradient is not None and gradient.numel() and share:
            gradients.append(gradient)
            shares[id(gradient)] = share
    powers = [torch.zeros_like(like)]
    for group in by_device_and_dtype(gradients):
        # bfloat16 has no digits to spare for a sum of squares.
        wide = None if group[0].is_complex() else torch.promote_types(group[0].dtype, torch.float32)
        norms = torch.stack(torch._foreach_norm(group, norm_type, dtype=wide))
        norms = norms.to(device=like.device, dtype=like.dtype, non_blocking=True)
        share_list = [shares[id(gradient)] for gradient in group]
        powered = norms if math.isinf(norm_type) else norms**norm_type
        if any(share != 1.0 for share in share_list) and not math.isinf(norm_type):
            # Multiplying from the host's numbers one by one copies nothing to the device.
            powered = torch.stack([value * share for value, share in zip(powered.unbind(), share_list, strict=True)])
        powers.append(_combine(powered, norm_type))
    return _combine(torch.stack(powers), norm_type)


def _reduce_over(value: torch.Tensor, groups: Sequence[dist.ProcessGroup], norm_type: float) -> torch.Tensor:
    for group in groups:
        if group.size() > 1:
            gathered = [torch.empty_like(value) for _ in range(group.size())]
            dist.all_gather(gathered, value, group=group)
            value = _combine(torch.stack(gathered), norm_type)
    return value


def _combine(values: torch.Tensor, norm_type: float) -> torch.Tensor:
    return values.amax() if math.isinf(norm_type) else values.sum()


def _root(total: torch.Tensor, norm_type: float) -> torch.Tensor:
    return total if math.isinf(norm_type) else total ** (1.0 / norm_type)


def _sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64
