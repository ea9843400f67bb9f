"""Giving memory and values to the part of a meta-built module that this rank owns.

A module that is too large for one device is built on the meta device. After placement each rank allocates its own
parameters and fills them: from a checkpoint, from files of pretrained weights, or as building the module in memory
would, by ``reset_parameters()`` of the module that holds them and ``_init_weights()`` of the transformers model around
it. The random state is set from the module's name, so every pipeline size starts from the same values.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from d9d_lightning.errors import PartitionError
from d9d_lightning.partition.snapshot import RandomState
from d9d_lightning.runtime.pretrained import PretrainedWeights

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
    given: Collection[str] = (),
    pretrained: PretrainedWeights | None = None,
) -> None:
    """Allocate and fill what this rank owns; parameters keep their objects.

    Args:
        root: The user's module.
        owned: Qualified names of this rank's parameters. Buffers are allocated on every rank.
        device: Where they live.
        seed: Seed of the run.
        given: Names of what a checkpoint is about to fill; tied tensors under each of their names.
        pretrained: Files that fill what no checkpoint does.

    Raises:
        PartitionError: Nothing fills a parameter or buffer.
    """
    wanted = set(owned)
    from_files = [] if pretrained is None else [name for name in pretrained.names if name not in given]
    filled = {*given, *from_files}
    waiting: dict[str, Tensor] = {}
    done: set[int] = set()
    for path, module in root.named_modules() if needs_materializing(root) else ():
        prefix = f"{path}." if path else ""
        fresh = _allocate(module, prefix, wanted, device, done)
        if not filled.issuperset(fresh):
            waiting.update(_fill(root, path, module, fresh, seed))
    missing = sorted(name for name in waiting if name not in filled)
    if missing:
        raise PartitionError(
            f"{len(missing)} tensors of {type(root).__name__} were built on the meta device and nothing gives them "
            f"values: {missing[:5]}. Expected: a reset_parameters() method on the module that holds them, pretrained "
            "weights: D9DStrategy(pretrained_weights=...), or a checkpoint: trainer.fit(..., ckpt_path=...)."
        )
    if pretrained is not None:
        _read(root, wanted, from_files, pretrained)


def _read(root: nn.Module, owned: Collection[str], names: Collection[str], pretrained: PretrainedWeights) -> None:
    """Read this rank's parameters, and the buffers, which every rank has."""
    tensors = {**{name: p for name, p in root.named_parameters() if name in owned}, **dict(root.named_buffers())}
    for name in names:
        tensor = tensors.get(name)
        if tensor is not None:
            pretrained.read(name, tensor.detach())


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
    """What fills a module as building it in memory does: its own defaults, then what a model around it says."""
    for name in ("reset_parameters", "_reset_parameters", "reset_running_stats"):
        method = getattr(module, name, None)
        if callable(method):
            yield method
            if name != "reset_running_stats":
                break
    parts = path.split(".") if path else []
    for depth in range(len(parts), -1, -1):
        method = getattr(root.get_submodule(".".join(parts[:depth])), "_init_weights", None)
        if callable(method) and len(inspect.signature(method).parameters) == 1:
            yield functools.partial(method, module)
            return
