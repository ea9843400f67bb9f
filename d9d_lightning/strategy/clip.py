"""Clipping by the norm of the whole module, of which a rank holds a part.

The methods are bound on the plugin *instance*: its class name is a key of the checkpoint and must not change.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from d9d_lightning.gradients import clip_gradients_by_norm, clip_gradients_by_value

__all__ = ["bind_clipping"]


def bind_clipping(
    plugin: Precision,
    *,
    group: ProcessGroup | None,
    weights: Mapping[Tensor, float],
    device: torch.device,
    before_hooks: Callable[[], None],
    before_step: Sequence[Callable[[], None]],
) -> None:
    """Make a plugin clip by the global norm.

    Args:
        plugin: The trainer's precision plugin.
        group: Ranks that hold other parts of the module; None where this one holds it all.
        weights: Share of each parameter's norm that this rank accounts for; 0 for a shared one that another rank
            counts.
        device: Where norms are computed.
        before_hooks: Called before the hooks of a step and before clipping.
        before_step: Called after clipping, right before the optimizer steps.
    """
    groups = () if group is None else (group,)

    def clip_grad_by_norm(self: Precision, optimizer: Optimizer, clip_val: float) -> None:
        parameters = list(self.main_params(optimizer))
        clip_gradients_by_norm(parameters, float(clip_val), groups=groups, weights=weights, device=device)

    def clip_grad_by_value(self: Precision, optimizer: Optimizer, clip_val: float) -> None:
        clip_gradients_by_value(self.main_params(optimizer), float(clip_val))

    def after_closure(self: Precision, model: Any, optimizer: Any) -> None:
        before_hooks()
        type(self)._after_closure(self, model, optimizer)
        for call in before_step:
            call()

    plugin.clip_grad_by_norm = types.MethodType(clip_grad_by_norm, plugin)  # type: ignore[method-assign]
    # torch's own clamps no sparse gradients
    plugin.clip_grad_by_value = types.MethodType(clip_grad_by_value, plugin)  # type: ignore[method-assign]
    plugin._after_closure = types.MethodType(after_closure, plugin)  # type: ignore[method-assign]
    if getattr(plugin, "scaler", None) is None:
        # MixedPrecision refuses fused optimizers whatever the element type; that is right with a scaler only
        plugin.clip_gradients = types.MethodType(Precision.clip_gradients, plugin)  # type: ignore[method-assign]
