"""Sends a tree of tensors to another process, one tensor at a time, so that nobody ever holds it twice."""

from __future__ import annotations

import math
import os
import pickle
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map

__all__ = ["receive_tree", "send_tree"]

FILE_BACKED_BYTES = 2**18
"""Received tensors of at least this size live in an unlinked file, so that they cost page cache and no memory."""


@dataclass(frozen=True)
class _Reference:
    """Stands for a tensor in the tree that was sent; equal tensors share one."""

    index: int


@dataclass(frozen=True)
class _Shape:
    """What the receiver allocates."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def send_tree(tree: Any, target: int, group: ProcessGroup) -> None:
    """Send containers, python values and tensors.

    Args:
        tree: What to send; tensors of any device. Tensors that are the same memory stay so at the receiver.
        target: Global rank of the receiver, which calls :func:`receive_tree`.
        group: A gloo group of both.
    """
    tensors: list[Tensor] = []
    known: dict[tuple[Any, ...], int] = {}

    def replace(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        leaf = leaf.detach()
        key = (leaf.untyped_storage()._cdata, leaf.storage_offset(), leaf.shape, leaf.stride(), leaf.dtype)
        if key not in known:
            known[key] = len(tensors)
            tensors.append(leaf)
        return _Reference(known[key])

    skeleton = tree_map(replace, tree)
    shapes = [_Shape(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    head = torch.frombuffer(bytearray(pickle.dumps((skeleton, shapes))), dtype=torch.uint8)
    dist.send(torch.tensor([head.numel()]), target, group=group)
    dist.send(head, target, group=group)
    for tensor in tensors:
        if tensor.numel():
            dist.send(_as_bytes(tensor.cpu().contiguous()), target, group=group)


def receive_tree(source: int, group: ProcessGroup, spool: Path | None = None) -> Any:
    """Receive what :func:`send_tree` sent, on the CPU.

    Args:
        source: Global rank of the sender.
        group: The group that it used.
        spool: Directory for large tensors; the system's by default.
    """
    length = torch.zeros(1, dtype=torch.int64)
    dist.recv(length, source, group=group)
    head = torch.zeros(int(length), dtype=torch.uint8)
    dist.recv(head, source, group=group)
    skeleton, shapes = pickle.loads(head.numpy().tobytes())
    tensors = []
    for shape in shapes:
        tensor = _allocate(shape, spool)
        if tensor.numel():
            dist.recv(_as_bytes(tensor), source, group=group)
        tensors.append(tensor)
    return tree_map(lambda leaf: tensors[leaf.index] if isinstance(leaf, _Reference) else leaf, skeleton)


def _as_bytes(tensor: Tensor) -> Tensor:
    """The same memory as bytes: gloo knows few element types."""
    return tensor.reshape(-1).view(torch.uint8)


def _allocate(shape: _Shape, spool: Path | None) -> Tensor:
    count = math.prod(shape.shape)
    if count * shape.dtype.itemsize < FILE_BACKED_BYTES:
        return torch.empty(shape.shape, dtype=shape.dtype)
    handle, name = tempfile.mkstemp(prefix=".d9d-spool-", dir=spool)
    os.close(handle)
    try:
        return torch.from_file(name, shared=True, size=count, dtype=shape.dtype).reshape(shape.shape)
    finally:
        os.unlink(name)
