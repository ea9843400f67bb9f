"""Change many tensors in place with few kernels, and without the host waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

__all__: list[str] = []


def by_device_and_dtype(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Tensors that one kernel can take together."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return list(groups.values())


def scale_in_place(tensors: Sequence[torch.Tensor], factor: float | torch.Tensor) -> None:
    """Multiply tensors by a number or by a 0-dim tensor of any device."""
    with torch.no_grad():
        for group in by_device_and_dtype(tensors):
            here = factor
            if isinstance(factor, torch.Tensor):
                here = factor.to(device=group[0].device, dtype=group[0].dtype, non_blocking=True)
            torch._foreach_mul_(group, here)


def clamp_in_place(tensors: Sequence[torch.Tensor], limit: float) -> None:
    """Clamp tensors to ``[-limit, limit]``."""
    with torch.no_grad():
        for group in by_device_and_dtype(tensors):
            torch._foreach_clamp_min_(group, -limit)
            torch._foreach_clamp_max_(group, limit)
