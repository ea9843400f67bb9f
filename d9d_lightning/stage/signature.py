"""What decides which plan a microbatch needs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from d9d_lightning.partition.structure import constant_key, flatten
from d9d_lightning.values import Microbatch

__all__ = ["Described", "Signature", "describe_batch"]

Signature = tuple[Any, ...]

_PLAIN_DEPTH = 4
"""Containers nested deeper, perhaps in themselves, are left to :func:`flatten`."""


@dataclass(frozen=True, slots=True)
class Described:
    """A microbatch taken apart, once a step.

    Attributes:
        microbatch: The microbatch.
        signature: What a trace depends on: geometry and constants of the arguments, modes, and which parameters are
            trained.
        tensors: The tensors of its arguments.
    """

    microbatch: Microbatch
    signature: Signature
    tensors: tuple[Tensor, ...]

    def content(self) -> str:
        """A digest of everything the step is given."""
        text = hashlib.sha256(repr(flatten((self.microbatch.args, dict(self.microbatch.kwargs)))[0]).encode())
        for tensor in self.tensors:
            dense = tensor.detach().to_dense() if tensor.layout is not torch.strided else tensor.detach()
            text.update(dense.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return text.hexdigest()


def describe_batch(
    kind: str, modules: Sequence[nn.Module], parameters: Sequence[nn.Parameter], microbatches: Sequence[Microbatch]
) -> list[Described]:
    """Take the microbatches of one step apart.

    Args:
        kind: Name of the step; different steps have different plans.
        modules: All modules, for their modes.
        parameters: All parameters, for whether they are trained.
        microbatches: The slices of the batch.
    """
    trained = hash(tuple([parameter.requires_grad for parameter in parameters]))
    modes = hash(tuple([module.training for module in modules]))
    context = (kind, trained, modes, torch.is_grad_enabled())
    return [_describe(microbatch, context) for microbatch in microbatches]


def _describe(microbatch: Microbatch, context: tuple[Any, ...]) -> Described:
    args = microbatch.args[:1] + microbatch.args[2:]  # the number of the batch decides nothing by itself
    kwargs = {name: value for name, value in microbatch.kwargs.items() if name != "batch_idx"}
    tensors: list[Tensor] = []
    key = _key_of((args, kwargs), tensors, {}, 0)
    shapes = tuple([(tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in tensors])
    return Described(microbatch, (*context, key, shapes), tuple(tensors))


def _key_of(value: Any, tensors: list[Tensor], positions: dict[int, int], depth: int) -> Any:
    """What :func:`constant_key` says of a value's template; the containers that most batches are need no template."""
    kind = type(value)
    if isinstance(value, Tensor):
        return _position_of(value, tensors, positions)
    if value is None or kind is int or kind is bool:
        return (value,)
    if depth < _PLAIN_DEPTH:
        if kind is tuple:
            return ("sequence", (), tuple([_key_of(item, tensors, positions, depth + 1) for item in value]))
        if kind is dict:
            items = tuple([_key_of(item, tensors, positions, depth + 1) for item in value.values()])
            return ("dict", tuple(value), items)
    template, found = flatten(value)
    return (constant_key(template), tuple([_position_of(tensor, tensors, positions) for tensor in found]))


def _position_of(tensor: Tensor, tensors: list[Tensor], positions: dict[int, int]) -> int:
    position = positions.setdefault(id(tensor), len(tensors))
    if position == len(tensors):
        tensors.append(tensor)
    return position
