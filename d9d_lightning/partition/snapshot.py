"""Remembering the state that a run of the step may change, and putting it back.

A trace leaves no trace: attributes, containers, buffers, generators and the global random state are afterwards what
they were before, and in the same objects.
"""

from __future__ import annotations

import operator
import random
import types
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from d9d_lightning.partition.generators import (
    equal_states,
    generator_state,
    is_generator,
    numpy_random,
    set_generator_state,
)

__all__ = ["ModuleSnapshot", "RandomState", "fill_container", "is_plain_object"]

_SKIPPED = frozenset(
    {"_parameters", "_modules", "_buffers", "_call_impl", "_compiled_call_impl", "forward", "_trainer"}
)
_FOREIGN = ("torch", "lightning", "pytorch_lightning", "numpy", "builtins", "lightning_utilities", "functools")


class RandomState:
    """State of the global random generators of torch (every device in use), Python and numpy."""

    def __init__(self) -> None:
        self.torch = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self.python = random.getstate()
        source = numpy_random()
        self.numpy = None if source is None else source.get_state()

    def restore(self) -> None:
        """Put the generators back."""
        torch.set_rng_state(self.torch)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.python)
        if self.numpy is not None:
            numpy_random().set_state(self.numpy)

    def drawn_since(self) -> frozenset[str]:
        """Kinds of generators that moved since this state was taken."""
        now = RandomState()
        kinds = set()
        if not torch.equal(now.torch, self.torch) or any(
            not torch.equal(a, b) for a, b in zip(now.cuda, self.cuda, strict=False)
        ):
            kinds.add("torch")
        if now.python != self.python:
            kinds.add("python")
        if self.numpy is not None and _numpy_moved(self.numpy, now.numpy):
            kinds.add("numpy")
        return frozenset(kinds)


def _numpy_moved(before: Any, now: Any) -> bool:
    # Normal numbers are drawn in pairs: a draw may do no more than use up the second one, which is kept apart.
    return bool(before[2:] != now[2:] or (before[1] != now[1]).any())


def is_plain_object(value: Any) -> bool:
    """An object of the user's own making, whose fields count as state."""
    if not hasattr(value, "__dict__") or isinstance(value, _NOT_STATE) or is_generator(value):
        return False
    return type(value).__module__.split(".")[0] not in _FOREIGN


_SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device})


_EMPTY: dict[type, Any] = {dict: {}, OrderedDict: {}, list: [], set: set()}
"""What an empty container is remembered as; most of a module's fields are tables of hooks without any."""


def _attributes(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in _SKIPPED}


class ModuleSnapshot:
    """The state of a module tree, except its parameters.

    Buffers and tensors on attributes are replaced by copies while the snapshot is held, so that whatever is written
    goes into the copies.

    Args:
        root: The user's module.
        excluded: Modules whose attributes are left alone (metrics, whose updates are suppressed anyway).
    """

    def __init__(self, root: nn.Module, excluded: Iterable[nn.Module] = ()) -> None:
        self._root = root
        skipped = {id(module) for module in excluded}
        self._modules = [(path, module) for path, module in root.named_modules() if id(module) not in skipped]
        self._fields = [dict(vars(module)) for _, module in self._modules]
        self._containers: dict[int, tuple[Any, Any]] = {}
        self._objects: list[tuple[Any, dict[str, Any]]] = []
        self._generators: dict[int, tuple[Any, Any]] = {}
        self._remember_fields()
        self._random = RandomState()
        self._buffers = [dict(module._buffers) for _, module in self._modules]
        self.copies: dict[str, torch.Tensor] = {}
        made: dict[int, torch.Tensor] = {}
        for (path, module), fields in zip(self._modules, self._fields, strict=True):
            tensors = {n: v for n, v in fields.items() if type(v) is torch.Tensor and n not in _SKIPPED}
            for place, items in ((module._buffers, module._buffers.items()), (module.__dict__, tensors.items())):
                for name, tensor in list(items):
                    if tensor is not None:
                        copy = made.setdefault(id(tensor), tensor.detach().clone())
                        place[name] = copy
                        self.copies[f"{path}.{name}" if path else name] = copy
        self._versions = {name: copy._version for name, copy in self.copies.items()}

    def _remember_fields(self) -> None:
        for fields in self._fields:
            for name, value in fields.items():
                kind = type(value)
                if kind in _SCALARS or name in _SKIPPED:
                    continue
                if kind in _EMPTY and not value:
                    self._containers.setdefault(id(value), (value, _EMPTY[kind]))
                else:
                    self._remember(value, 0)

    def _remember(self, value: Any, depth: int) -> None:
        if type(value) in _SCALARS or isinstance(value, torch.Tensor | nn.Module):
            return
        if depth > 4 or id(value) in self._containers:
            return
        if is_generator(value):
            self._generators[id(value)] = (value, generator_state(value))
            return
        if isinstance(value, dict):
            self._containers[id(value)] = (value, dict(value))
            children: Iterable[Any] = value.values()
        elif isinstance(value, list | deque | set):
            self._containers[id(value)] = (value, type(value)(value) if not isinstance(value, deque) else list(value))
            children = list(value)
        elif isinstance(value, tuple):
            children = value
        elif is_plain_object(value):
            self._containers[id(value)] = (vars(value), dict(vars(value)))
            self._objects.append((value, vars(value)))
            children = vars(value).values()
        else:
            return
        for child in list(children):
            self._remember(child, depth + 1)

    def _collect(self, value: Any, found: set[int]) -> None:
        """Containers reachable from a value, as :meth:`_remember` enters them."""
        target = vars(value) if is_plain_object(value) else value
        if not (isinstance(target, _NESTED) or id(target) in self._generators) or id(target) in found:
            return
        found.add(id(target))
        if id(target) in self._generators:
            return
        for child in list(target.values() if isinstance(target, dict) else target):
            self._collect(child, found)

    def changed(self, units: dict[str, nn.Module]) -> Iterator[str]:
        """Qualified names of attributes, buffers and generators outside the units that differ from the snapshot."""
        touched = list(self._touched())
        inside = {id(module) for unit in units.values() for module in unit.modules()} if touched else set()
        for path, module, fields in touched:
            prefix = f"{path}." if path else ""
            before, now = _attributes(fields), _attributes(vars(module))
            for name in sorted(set(before) | set(now)):
                if name.startswith("__") or (id(module) in inside and name not in _HOOKS):
                    continue
                old, new = before.get(name, _MISSING), now.get(name, _MISSING)
                if self._is_untouched_copy(prefix + name, new):
                    continue
                if (old is not new and not _same_constant(old, new)) or self._content_changed(new, set()):
                    yield prefix + name
            for name, buffer in module._buffers.items() if id(module) not in inside else ():
                if buffer is not None and not self._is_untouched_copy(prefix + name, buffer):
                    yield prefix + name

    def _touched(self) -> Iterator[tuple[str, nn.Module, dict[str, Any]]]:
        """Modules that may differ from the snapshot, with the fields they had."""
        quiet = (
            not self._changed_containers()
            and all(vars(value) is fields for value, fields in self._objects)
            and all(equal_states(generator_state(g), state) for g, state in self._generators.values())
        )
        for (path, module), fields in zip(self._modules, self._fields, strict=True):
            if not quiet or module._buffers or not _same_entries(vars(module), fields):
                yield path, module, fields

    def _changed_containers(self) -> list[tuple[Any, Any]]:
        """Containers that differ, and their remembered content."""
        return [
            (value, saved)
            for value, saved in self._containers.values()
            if (saved or len(value)) and _differs(value, saved)
        ]

    def generators_outside(self, units: dict[str, nn.Module]) -> list[tuple[str, Any]]:
        """Generators that glue can reach, with the names of the attributes that hold them."""
        if not self._generators:
            return []
        inside = {id(module) for unit in units.values() for module in unit.modules()}
        found: dict[int, tuple[str, Any]] = {}
        for (path, module), fields in zip(self._modules, self._fields, strict=True):
            for name, value in _attributes(fields).items() if id(module) not in inside else ():
                reached: set[int] = set()
                self._collect(value, reached)
                for key in reached & self._generators.keys():
                    found.setdefault(key, (f"{path}.{name}" if path else name, self._generators[key][0]))
        return list(found.values())

    def _is_untouched_copy(self, name: str, tensor: Any) -> bool:
        copy = self.copies.get(name)
        return copy is not None and tensor is copy and copy._version == self._versions[name]

    def _content_changed(self, value: Any, seen: set[int]) -> bool:
        if id(value) in seen:
            return False
        seen.add(id(value))
        if id(value) in self._generators:
            return not equal_states(generator_state(value), self._generators[id(value)][1])
        target = vars(value) if is_plain_object(value) else value
        saved = self._containers.get(id(value))
        if saved is None and not isinstance(value, tuple):
            return False
        if saved is not None and _differs(target, saved[1]):
            return True
        children = target.values() if isinstance(target, dict) else target
        return any(self._content_changed(child, seen) for child in children if self._holds_state(child))

    def _holds_state(self, value: Any) -> bool:
        return isinstance(value, _NESTED) or id(value) in self._generators or is_plain_object(value)

    def restore(self, keep: Collection[str] = ()) -> None:
        """Put everything back, in the objects it was in, except the names to keep."""
        kept_containers: set[int] = set()
        for (path, module), fields in zip(self._modules, self._fields, strict=True):
            if not keep and _same_entries(vars(module), fields):
                continue
            prefix, before = f"{path}." if path else "", _attributes(fields)
            kept = {name for name in _attributes(vars(module)) if prefix + name in keep}
            for name in kept:
                self._collect(vars(module)[name], kept_containers)
            for name in [n for n in _attributes(vars(module)) if n not in before and n not in kept]:
                del module.__dict__[name]
            module.__dict__.update({name: value for name, value in before.items() if name not in kept})
        for value, saved in self._changed_containers():
            if id(value) not in kept_containers:
                fill_container(value, saved)
        for value, fields in self._objects:
            if vars(value) is not fields and id(vars(value)) not in kept_containers:
                value.__dict__ = fields
        for generator, state in self._generators.values():
            set_generator_state(generator, state)
        for (_, module), buffers in zip(self._modules, self._buffers, strict=True):
            if not (buffers or module._buffers):
                continue
            if not isinstance(module, torch.jit.ScriptModule):  # whose buffers are fixed once it is made
                module._buffers.clear()
            for name, buffer in buffers.items():
                module._buffers[name] = buffer
        self._random.restore()


_HOOKS = frozenset(name for name in vars(nn.Module()) if name.endswith(("_hooks", "_with_kwargs", "_always_called")))
_NESTED = (dict, list, deque, set, tuple)
_NOT_STATE = (*_NESTED, type, nn.Module, types.ModuleType)


def fill_container(container: Any, content: Any) -> None:
    """Replace the content of a list, deque, set or dict, past any checks of its own class."""
    if isinstance(container, list):
        list.__setitem__(container, slice(None), list(content))
    elif isinstance(container, deque):
        content = list(content)
        container.clear()
        container.extend(content)
    elif isinstance(container, set):
        content = set(content)
        container.clear()
        container.update(content)
    else:
        plain = OrderedDict if isinstance(container, OrderedDict) else dict
        entries = list(content.items())
        plain.clear(container)
        for key, value in entries:
            plain.__setitem__(container, key, value)


class _Missing:
    pass


_MISSING = _Missing()


def _same_constant(old: Any, new: Any) -> bool:
    return type(old) is type(new) and isinstance(old, bool | int | float | str | bytes) and old == new


def _same_entries(fields: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether the same names hold the very same objects; unlike equality it asks no object for its opinion."""
    return (
        len(fields) == len(before)
        and all(map(operator.is_, fields.values(), before.values()))
        and list(fields) == list(before)
    )


def _differs(value: Any, saved: Any) -> bool:
    if len(value) != len(saved):
        return True
    if isinstance(value, dict):
        return any(key not in saved or saved[key] is not item for key, item in value.items())
    if isinstance(value, set):
        return bool(value != saved)
    return any(a is not b for a, b in zip(value, saved, strict=True))
