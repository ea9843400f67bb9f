"""Loss scaling on a pipeline: the loss owner scales, but every rank must know the scale and agree on overflows."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from d9d_lightning.strategy.compat import trainer_call

__all__ = ["announce_backward", "prepare_scaler", "scale_root", "step_context"]


def step_context(plugin: Precision, step_name: str) -> contextlib.AbstractContextManager[Any]:
    """Context of one call of the user's step; backward passes run outside of it."""
    contexts = {
        "training_step": plugin.train_step_context,
        "validation_step": plugin.val_step_context,
        "test_step": plugin.test_step_context,
        "predict_step": plugin.predict_step_context,
    }
    return contexts[step_name]()


def scale_root(plugin: Precision, root: Tensor) -> Tensor:
    """Multiply by the loss scale, where the plugin has one."""
    scaler = getattr(plugin, "scaler", None)
    if scaler is None:
        return root
    scaled: Tensor = scaler.scale(root)
    return scaled


def prepare_scaler(plugin: Precision, device: torch.device, group: ProcessGroup | None) -> None:
    """Make all ranks skip a step together when any of them sees an overflow.

    Args:
        plugin: The trainer's plugin; its scaler is replaced, once, by one that reduces over ``group``.
        device: Device of gradients.
        group: All processes whose optimizers step together; None for a single process.
    """
    scaler = getattr(plugin, "scaler", None)
    if scaler is None:
        return
    if group is not None and not isinstance(scaler, ShardedGradScaler):
        shared = ShardedGradScaler(device=device.type, process_group=group)
        shared.load_state_dict(scaler.state_dict())
        plugin.scaler = shared  # type: ignore[attr-defined]
        scaler = shared
    # ranks without the loss never call `scale`, which is what creates the scale
    scaler.scale(torch.zeros(1, device=device))


def announce_backward(plugin: Precision, module: LightningModule, loss: Tensor) -> None:
    """Call ``on_before_backward`` of callbacks and module, with the loss of the whole batch on every rank."""
    trainer = module.trainer
    trainer_call._call_callback_hooks(trainer, "on_before_backward", loss)
    trainer_call._call_lightning_module_hook(trainer, "on_before_backward", loss)
