"""Each stage's own copy of the state that a step leaves changed.

One module object serves many replays. ``self.count += 1`` at the end of a step must happen once per microbatch as seen
by each stage, not once per replay; a running average written by glue must not be written twice where one rank holds two
stages. So the state that the trace saw change is swapped in before a replay and out after it, and the copy of the stage
that finishes the step becomes the module's state after the batch.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from d9d_lightning.partition.generators import generator_state, is_generator, set_generator_state
from d9d_lightning.partition.placeholder import is_placeholder
from d9d_lightning.partition.snapshot import fill_container, is_plain_object
from d9d_lightning.partition.structure import tensors_in

__all__ = ["PrivateWorld", "Unknown", "adopt_state", "export_state"]


class Unknown:
    """An attribute whose value only the stage that finishes the step knows."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{self.name}: known on the stage of the loss only>"


class _Slot:
    """One place whose content is swapped."""

    def get(self) -> Any:
        raise NotImplementedError

    def set(self, value: Any) -> None:
        raise NotImplementedError


class _AttributeSlot(_Slot):
    def __init__(self, root: nn.Module, name: str) -> None:
        path, _, self.attribute = name.rpartition(".")
        self.module = root.get_submodule(path)
        self.place = self.module._buffers if self.attribute in self.module._buffers else self.module.__dict__

    def get(self) -> Any:
        return self.place.get(self.attribute, _ABSENT)

    def set(self, value: Any) -> None:
        if value is _ABSENT:
            self.place.pop(self.attribute, None)
        else:
            self.place[self.attribute] = value


class _ContentSlot(_Slot):
    def __init__(self, container: Any) -> None:
        self.container = container

    def get(self) -> Any:
        if isinstance(self.container, dict):
            return dict(self.container)
        return set(self.container) if isinstance(self.container, set) else list(self.container)

    def set(self, value: Any) -> None:
        fill_container(self.container, value)


class _ObjectSlot(_ContentSlot):
    def __init__(self, holder: Any) -> None:
        super().__init__(vars(holder))


class _GeneratorSlot(_Slot):
    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def get(self) -> Any:
        return generator_state(self.generator)

    def set(self, value: Any) -> None:
        set_generator_state(self.generator, value)


_ABSENT = object()


def _slots_of(root: nn.Module, name: str) -> list[_Slot]:
    slot = _AttributeSlot(root, name)
    slots: list[_Slot] = [slot]
    seen: set[int] = set()

    def enter(value: Any, depth: int) -> None:
        if depth > 4 or id(value) in seen:
            return
        seen.add(id(value))
        if is_generator(value):
            slots.append(_GeneratorSlot(value))
        elif isinstance(value, dict | list | set | deque):
            slots.append(_ContentSlot(value))
            for child in list(value.values() if isinstance(value, dict) else value):
                enter(child, depth + 1)
        elif isinstance(value, tuple):
            for child in value:
                enter(child, depth + 1)
        elif is_plain_object(value):
            slots.append(_ObjectSlot(value))
            for child in list(vars(value).values()):
                enter(child, depth + 1)

    enter(slot.get(), 0)
    return slots


class PrivateWorld:
    """The changing state of one module as one stage sees it during a batch.

    Args:
        root: The user's module.
        names: Qualified names of the state that the trace saw change.
    """

    def __init__(self, root: nn.Module, names: Sequence[str]) -> None:
        self._root = root
        self._names = tuple(names)
        self._slots: list[_Slot] = [slot for name in names for slot in _slots_of(root, name)]
        self._content: list[Any] = [_private(slot.get()) for slot in self._slots]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Swap this stage's state in, and the module's own back at the end."""
        base = [slot.get() for slot in self._slots]
        self._swap_in()
        try:
            yield
        finally:
            self._content = [slot.get() for slot in self._slots]
            for slot, value in zip(self._slots, base, strict=True):
                slot.set(value)

    def _swap_in(self) -> None:
        for slot, value in zip(self._slots, self._content, strict=True):
            slot.set(value)

    def forget_unfinished(self, before: Sequence[Any]) -> None:
        """After a replay that was cut early, mark attributes that it did not come to change."""
        for index, (slot, old) in enumerate(zip(self._slots, before, strict=True)):
            if isinstance(slot, _AttributeSlot) and self._content[index] is old and not _is_container(old):
                self._content[index] = Unknown(slot.attribute)

    @property
    def content(self) -> list[Any]:
        """What the state holds now, place by place."""
        return list(self._content)

    def commit(self) -> None:
        """Make this stage's state the module's own; tensors keep their objects."""
        for slot, value in zip(self._slots, self._content, strict=True):
            old = slot.get()
            if isinstance(slot, _AttributeSlot) and _same_form(old, value):
                with torch.no_grad():
                    old.copy_(value)
            else:
                slot.set(value)


def _private(value: Any) -> Any:
    return value.detach().clone() if type(value) is torch.Tensor else value


def _same_form(old: Any, new: Any) -> bool:
    tensors = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and not is_placeholder(new)
    return tensors and old.shape == new.shape and old.dtype == new.dtype and not old.requires_grad and old is not new


def _is_container(value: Any) -> bool:
    return isinstance(value, dict | list | set | deque | tuple) or is_generator(value) or is_plain_object(value)


def export_state(root: nn.Module, names: Sequence[str]) -> dict[str, bytes]:
    """The named state, for other ranks; what cannot be pickled is left out."""
    exported: dict[str, bytes] = {}
    for name in names:
        value = _AttributeSlot(root, name).get()
        if is_generator(value):
            value = generator_state(value)
        if any(tensor.requires_grad for tensor in tensors_in(value)):
            value = _detached(value)
        try:
            exported[name] = _pickled(value)
        except (pickle.PicklingError, TypeError, AttributeError, RuntimeError):
            continue
    return exported


class _Pickler(pickle.Pickler):
    """Takes torch's generators along, which cannot be pickled by themselves."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Generator):
            return _make_generator, (value.device.type, value.get_state())
        return NotImplemented


def _make_generator(device: str, state: torch.Tensor) -> torch.Generator:
    generator = torch.Generator(device)
    generator.set_state(state)
    return generator


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _detached(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _detached(item) for key, item in value.items()}
    return type(value)(map(_detached, value)) if type(value) in (list, tuple) else value


def adopt_state(root: nn.Module, exported: dict[str, bytes]) -> None:
    """Take over the state of the rank that finished the step; containers keep their objects."""
    for name, data in exported.items():
        slot = _AttributeSlot(root, name)
        old, value = slot.get(), pickle.loads(data)
        if is_generator(old):
            set_generator_state(old, value)
        elif _same_form(old, value):
            with torch.no_grad():
                old.copy_(value)
        elif isinstance(old, dict | list | set | deque) and type(old) is type(value):
            fill_container(old, value)
        elif is_plain_object(old) and type(old) is type(value):
            fill_container(vars(old), vars(value))
        else:
            slot.set(value)
