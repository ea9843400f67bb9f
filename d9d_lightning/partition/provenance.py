"""Where a tensor's content comes from: values of units, and parameters read by glue.

A dispatch mode follows every operator of the glue. Provenance belongs to the memory, not to the tensor object, so that
a write through a view marks everything that shares it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_lightning.partition import shapes
from d9d_lightning.partition.placeholder import Cell, Placeholder
from d9d_lightning.partition.structure import tensors_in
from d9d_lightning.values import ValueId

__all__ = ["Provenance", "Source"]

Source = ValueId | str
"""A value, or the name of a parameter."""

_NONE: frozenset[Source] = frozenset()


class Provenance(TorchDispatchMode):
    """Follows glue while active.

    Attributes:
        read: Sources of everything whose content decided what glue did (``if mask.any()``, ``.item()``, ``nonzero``).
        shapes_follow_data: Whether an operator made a tensor whose shape depends on data.
        overwritten: Values changed in place by glue.
        writes: For each watched tensor written by glue, the sources of its new content.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read: frozenset[Source] = _NONE
        self.shapes_follow_data = False
        self.overwritten: set[ValueId] = set()
        self.writes: dict[Any, frozenset[Source]] = {}
        self._memory: dict[int, Cell] = {}
        self._alive: list[Any] = []  # an address names a memory only while the memory lives
        self._values: dict[int, set[ValueId]] = {}
        self._watched: dict[int, Any] = {}

    def cell(self, tensor: torch.Tensor) -> Cell:
        """What is known of the memory behind a tensor."""
        if isinstance(tensor, Placeholder):
            return tensor.cell
        key, owner = _memory_of(tensor)
        cell = self._memory.get(key)
        if cell is None:
            cell = self._memory[key] = Cell()
            self._alive.append(owner)
        return cell

    def sources(self, value: Any) -> frozenset[Source]:
        """Sources of every tensor inside a value."""
        found: set[Source] = set()
        for tensor in tensors_in(value):
            found |= self.cell(tensor).sources
        return frozenset(found)

    def mark(self, tensor: torch.Tensor, sources: Iterable[Source]) -> None:
        """Say where a tensor comes from."""
        self.cell(tensor).sources = frozenset(sources)

    def mark_value(self, tensor: torch.Tensor, value: ValueId, sources: Iterable[Source]) -> None:
        """Say that a tensor is a value."""
        cell = self.cell(tensor)
        cell.sources = frozenset(sources)
        self._values.setdefault(id(cell), set()).add(value)
        self._alive.append(cell)

    def watch(self, tensor: torch.Tensor, name: Any) -> None:
        """Report writes by glue into a tensor, under a name."""
        cell = self.cell(tensor)
        self._watched[id(cell)] = name
        self._alive.append(cell)

    def note_overwritten(self, tensor: torch.Tensor) -> None:
        """Say that a unit changed a tensor in place."""
        cell = self.cell(tensor)
        self.overwritten |= self._values.get(id(cell), set())
        if id(cell) in self._watched:
            self.writes.setdefault(self._watched[id(cell)], _NONE)

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = shapes.tensors_of((args, kwargs))
        found: set[Source] = set()
        for tensor in inputs:
            found |= self.cell(tensor).sources
        out = func(*args, **kwargs)
        if _reads_values(func):
            self.read |= found
            self.shapes_follow_data |= torch.Tag.dynamic_output_shape in func.tags
        written = shapes.written_positions(func, args, kwargs)
        for position in written:
            cell = self.cell(inputs[position])
            self.overwritten |= self._values.get(id(cell), set())
            if id(cell) in self._watched:
                name = self._watched[id(cell)]
                self.writes[name] = self.writes.get(name, _NONE) | found
            cell.sources = cell.sources | found
        if found:
            for tensor in shapes.tensors_of(out):
                cell = self.cell(tensor)
                cell.sources = cell.sources | found
        return out


_UNTAGGED_READERS = (torch.ops.aten._pack_padded_sequence.default, torch.ops.aten._pad_packed_sequence.default)
"""Operators whose output shape depends on values although torch does not say so."""


def _reads_values(func: Any) -> bool:
    tags = func.tags
    return (
        torch.Tag.data_dependent_output in tags
        or torch.Tag.dynamic_output_shape in tags
        or func in _UNTAGGED_READERS
        or func in shapes.DRAWS_BY_VALUE  # what is drawn next depends on it
    )


def _memory_of(tensor: torch.Tensor) -> tuple[int, Any]:
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # sparse tensors have no storage of their own
        return id(tensor), tensor
    return storage._cdata, storage
