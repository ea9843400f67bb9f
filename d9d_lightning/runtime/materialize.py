"""Giving memory and values to the part of a meta-built module that this rank owns.

A module that is too large for one device is built on the meta device. After placement each rank allocates its own
parameters and fills them as the module itself would: by ``reset_parameters()`` of the module that holds them, or by
``_init_weights()`` of the transformers model around it. The random state is set from the module's name, so every
pipeline size starts from the same values.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from d9d_lightning.errors import PartitionError
from d9d_lightning.partition.snapshot import RandomState

__all__ = ["materialize", "needs_materializing"]


def needs_materializing(root: nn.Module) -> bool:
    """Whether any parameter or buffer has no memory yet."""
    return any(tensor.is_meta for tensor in (*root.parameters(), *root.buffers()))


def materialize(
    root: nn.Module,
    owned: Collection[str],
    device: torch.device,
    *,
    seed: int = 0,
    values_follow: bool = False,
) -> None:
    """Allocate and fill what this rank owns; parameters keep their objects.

    Args:
        root: The user's module.
        owned: Qualified names of this rank's parameters. Buffers are allocated on every rank.
        device: Where they live.
        seed: Seed of the run.
        values_follow: A checkpoint is about to be loaded, so nothing has to be filled.

    Raises:
        PartitionError: Nothing fills a parameter or buffer.
    """
    wanted = set(owned)
    waiting: dict[str, Tensor] = {}
    done: set[int] = set()
    for path, module in root.named_modules():
        prefix = f"{path}." if path else ""
        fresh = _allocate(module, prefix, wanted, device, done)
        if fresh:
            waiting.update(_fill(root, path, module, fresh, seed))
    if waiting and not values_follow:
        names = sorted(waiting)
        raise PartitionError(
            f"{len(names)} tensors of {type(root).__name__} were built on the meta device and nothing gives them "
            f"values: {names[:5]}. Expected: a reset_parameters() method on the module that holds them, or a "
            "checkpoint: trainer.fit(..., ckpt_path=...)."
        )
    for tensor in waiting.values():
        with torch.no_grad():
            tensor.zero_()


def _allocate(
    module: nn.Module, prefix: str, owned: Collection[str], device: torch.device, done: set[int]
) -> dict[str, Tensor]:
    """Give memory to the direct tensors of a module; unfilled floats are NaN, so that it shows what was filled."""
    fresh: dict[str, Tensor] = {}
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta and prefix + name in owned and id(parameter) not in done:
            made = nn.Parameter(_unfilled(parameter, device), parameter.requires_grad)
            torch.utils.swap_tensors(parameter, made)  # optimizers may hold the object
            done.add(id(parameter))
            fresh[prefix + name] = parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = _unfilled(buffer, device)
            fresh[prefix + name] = module._buffers[name]  # type: ignore[assignment]
    return fresh


def _unfilled(tensor: Tensor, device: torch.device) -> Tensor:
    made = torch.empty_like(tensor, device=device)
    if made.is_floating_point() or made.is_complex():
        made.fill_(float("nan"))
    return made


def _fill(root: nn.Module, path: str, module: nn.Module, fresh: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Let the module fill its tensors; returns those that still have no value."""
    filled_by_call = False
    state = RandomState()
    try:
        torch.manual_seed(int.from_bytes(hashlib.blake2b(f"{seed}/{path}".encode(), digest_size=7).digest(), "little"))
        with torch.no_grad():
            for fill in _initializers(root, path, module):
                fill()
                filled_by_call = True
    finally:
        state.restore()
    return {
        name: tensor
        for name, tensor in fresh.items()
        if (bool(torch.isnan(tensor).any()) if tensor.is_floating_point() else not filled_by_call)
    }


def _initializers(root: nn.Module, path: str, module: nn.Module) -> Iterator[Callable[[], Any]]:
    for name in ("reset_parameters", "_reset_parameters", "reset_running_stats"):
        method = getattr(module, name, None)
        if callable(method):
            yield method
            if name != "reset_running_stats":
                return
    parts = path.split(".") if path else []
    for depth in range(len(parts), -1, -1):
        ancestor = root.get_submodule(".".join(parts[:depth]))
        method = getattr(ancestor, "_init_weights", None)
        if callable(method):
            yield functools.partial(method, module)
            return
