"""What one call of a unit did, as a trace writes it down."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from d9d_lightning.partition.effects import Effects
from d9d_lightning.partition.placeholder import Placeholder, is_placeholder
from d9d_lightning.values import ValueSpec

__all__ = ["ObservedCall", "spec_of", "version_of"]


@dataclass(frozen=True, slots=True)
class ObservedCall:
    """What one call of a unit did.

    Attributes:
        effects: What it made visible.
        tensors: The visible tensors.
        draws: Random generators that it advanced.
        flops: Floating point operations.
        memory: For each visible tensor a number that those sharing memory have in common.
        given: For each visible tensor the position of an argument that it shares memory with, or None.
    """

    effects: Effects
    tensors: list[torch.Tensor]
    draws: frozenset[str]
    flops: int
    memory: tuple[int, ...] = ()
    given: tuple[int | None, ...] = ()


def version_of(tensor: torch.Tensor) -> int:
    """Number of in-place writes into a tensor so far; -1 where that is not known."""
    if isinstance(tensor, Placeholder):
        return tensor.cell.version
    if is_placeholder(tensor):
        return -1
    return 0 if tensor.is_inference() else tensor._version


def spec_of(tensor: torch.Tensor) -> ValueSpec:
    """What a receiver must know of a tensor."""
    if tensor.layout is not torch.strided:
        return ValueSpec(tuple(tensor.shape), (), tensor.dtype, tensor.device.type, tensor.requires_grad, True)
    shape, stride = tuple(tensor.shape), tensor.stride()
    return ValueSpec(shape, stride, tensor.dtype, tensor.device.type, tensor.requires_grad)
