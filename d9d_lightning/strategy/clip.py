"""Clipping by the norm of the whole module, of which a rank holds a part.

The methods are bound on the plugin *instance*: its class name is a key of the checkpoint and must not change.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

__all__ = ["GradientClipper", "bind_clipping"]

EPSILON = 1e-6
"""Added to the norm, as ``torch.nn.utils.clip_grad_norm_`` does."""


class GradientClipper:
    """Scales the gradients of this rank by the norm over all ranks of the pipeline.

    Args:
        group: Processes of the pipeline; None where there is one.
        counts: Whether this rank counts a parameter; a shared one counts on one rank only.
        device: Where partial norms are computed.
    """

    def __init__(self, group: ProcessGroup | None, counts: Callable[[Tensor], bool], device: torch.device) -> None:
        self._group = group
        self._counts = counts
        self._device = device

    def total_norm(self, parameters: Sequence[Tensor]) -> Tensor:
        """Euclidean norm of the gradients of the whole module; collective over the pipeline.

        Args:
            parameters: Parameters of this rank.
        """
        grads = [p.grad for p in parameters if p.grad is not None and self._counts(p)]
        squares = [torch.linalg.vector_norm(grad, dtype=_norm_dtype(grad)).square() for grad in grads]
        total = torch.stack([s.to(self._device, torch.float64) for s in squares]).sum() if squares else None
        local = torch.zeros((), dtype=torch.float64, device=self._device) if total is None else total
        if self._group is not None:
            carried = local.cpu() if dist.get_backend(self._group) == "gloo" else local
            dist.all_reduce(carried, group=self._group)
            local = carried.to(self._device)
        return local.sqrt().float()

    def clip(self, parameters: Sequence[Tensor], limit: float) -> Tensor:
        """Scale gradients down where the norm is above ``limit``; returns the norm before."""
        norm = self.total_norm(parameters)
        factor = (limit / (norm + EPSILON)).clamp(max=1.0)
        grads = [p.grad for p in parameters if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor.to(grads[0].device))
        return norm


def _norm_dtype(grad: Tensor) -> torch.dtype | None:
    return torch.float32 if grad.dtype in (torch.float16, torch.bfloat16) else None


def bind_clipping(plugin: Precision, clipper: GradientClipper) -> None:
    """Replace the plugin's clipping by norm, and its refusal of fused optimizers, which holds for a scaler only."""

    def clip_grad_by_norm(self: Precision, optimizer: Optimizer, clip_val: float) -> None:
        clipper.clip(list(self.main_params(optimizer)), float(clip_val))

    plugin.clip_grad_by_norm = types.MethodType(clip_grad_by_norm, plugin)  # type: ignore[method-assign]
    if getattr(plugin, "scaler", None) is None:
        plugin.clip_gradients = types.MethodType(Precision.clip_gradients, plugin)  # type: ignore[method-assign]
