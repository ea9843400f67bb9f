"""After the schedule: gradients summed over owners of shared parameters, averaged over replicas, divided by weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from d9d_lightning.strategy.losses import WeightWindow

__all__ = ["GradientReduction", "sum_over"]


def sum_over(group: ProcessGroup | None, parameters: Sequence[nn.Parameter]) -> None:
    """Sum the gradients of the same parameters on all processes of a group.

    A parameter that has a gradient nowhere keeps None. One that has it on some processes counts as zero on the others.

    Args:
        group: Processes that hold ``parameters``, in the same order.
        parameters: Parameters of this process.
    """
    if group is None or not parameters or dist.get_world_size(group) == 1:
        return
    present = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
    dist.all_reduce(present, group=group)
    for parameter, count in zip(parameters, present.tolist(), strict=True):
        if not count:
            continue
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        dist.all_reduce(parameter.grad, group=group)


class GradientReduction:
    """Everything that happens to gradients between the last backward and ``on_after_backward``.

    Args:
        parameters: This rank's parameters by name.
        shared: For each set of owners, its group and the names of the parameters that its members share.
        replicas: Group of data-parallel replicas, or None where there is one.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        shared: Sequence[tuple[ProcessGroup, tuple[str, ...]]],
        replicas: ProcessGroup | None,
    ) -> None:
        self._parameters = dict(parameters)
        self._shared = tuple(shared)
        self._replicas = replicas

    def observer(self, synchronize: bool) -> Any:
        """What the executor tells about finished weight gradients."""
        return None

    def finish(self, window: WeightWindow) -> None:
        """Reduce the gradients of one accumulation window; collective."""
        for group, names in self._shared:
            sum_over(group, [self._parameters[name] for name in names])
        trained = [parameter for _, parameter in sorted(self._parameters.items()) if parameter.requires_grad]
        sum_over(self._replicas, trained)
        scale = self._window_scale(window)
        if scale != 1.0:
            grads = [parameter.grad for parameter in trained if parameter.grad is not None]
            if grads:
                torch._foreach_mul_(grads, scale)

    def _window_scale(self, window: WeightWindow) -> float:
        count = 1 if self._replicas is None else dist.get_world_size(self._replicas)
        if not window.used:
            return 1.0 / count
        pooled = torch.tensor(window.total, dtype=torch.float64)
        if self._replicas is not None:
            pooled = _pool(pooled, self._replicas)
        return window.close(float(pooled))


def _pool(value: Tensor, group: ProcessGroup) -> Tensor:
    on_device = value.cuda() if dist.get_backend(group) == "nccl" else value
    dist.all_reduce(on_device, group=group)
    return on_device.cpu()
