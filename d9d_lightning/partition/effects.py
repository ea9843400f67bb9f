"""What one call of a unit makes visible: its result, and everything it writes outside itself.

A stage that does not own the unit repeats these effects with received values or placeholders instead of running it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from d9d_lightning.errors import UnplannedCallError
from d9d_lightning.partition.placeholder import is_placeholder
from d9d_lightning.partition.structure import Constant, constants_differ, flatten, tensors_in, unflatten

__all__ = ["Effects", "HookRecorder", "Observation"]

_PLUMBING = frozenset(vars(nn.Module())) | {"_call_impl", "_compiled_call_impl", "forward"}


@dataclass(frozen=True, slots=True)
class Effects:
    """Where the visible values of a call are found, and one template over all of them.

    Attributes:
        template: Template of ``(result, attribute values, entries, hook records, written tensors)``.
        attributes: ``(submodule, attribute)`` that the call set.
        entries: ``(container number, key or position)`` of what it put into lists and dicts it can reach.
        hooks: Submodules whose forward hooks fired, in order.
        written: Tensors changed in place: ``("argument", position)`` or ``("buffer", name)``.
    """

    template: Any
    attributes: tuple[tuple[str, str], ...] = ()
    entries: tuple[tuple[int, Any], ...] = ()
    hooks: tuple[str, ...] = ()
    written: tuple[tuple[str, Any], ...] = ()

    @property
    def result_only(self) -> bool:
        """Whether the call did nothing but return."""
        return not (self.attributes or self.entries or self.hooks or self.written)

    def collect(self, result: Any, module: nn.Module, args: Any, records: Sequence[Any]) -> list[torch.Tensor]:
        """The visible tensors after the owner ran the call, in the order of the plan.

        Raises:
            UnplannedCallError: The call returned something of another form than in the trace.
        """
        attributes = [getattr(module.get_submodule(path), name, None) for path, name in self.attributes]
        entries = []
        if self.entries:
            reachable = containers_of(args, module)
            entries = [_entry(reachable, number, key) for number, key in self.entries]
        arguments = flatten(args)[1] if any(kind == "argument" for kind, _ in self.written) else []
        written = [arguments[key] if kind == "argument" else module.get_buffer(key) for kind, key in self.written]
        template, tensors = flatten((result, attributes, entries, list(records)[: len(self.hooks)], written))
        difference = constants_differ(self.template, template)
        if difference:
            raise UnplannedCallError(f"it returned {difference}")
        return tensors

    def apply(
        self, module: nn.Module, args: Any, get: Callable[[int], torch.Tensor], undo: list[Callable[[], None]]
    ) -> Any:
        """Repeat the effects without running the call.

        Args:
            module: The unit.
            args: ``(args, kwargs)`` of the call.
            get: Supplies each visible tensor.
            undo: Receives what takes back the writes into the unit itself: another stage of this process may own it.

        Returns:
            What the call returns.
        """
        result, attributes, entries, records, written = unflatten(self.template, get)
        for (path, name), value in zip(self.attributes, attributes, strict=True):
            holder = module.get_submodule(path)
            undo.append(_attribute_restorer(holder, name))
            setattr(holder, name, value)
        if self.entries:
            reachable = containers_of(args, module)
            undo.extend(_content_restorer(container) for container in reachable[len(containers_of(args, _EMPTY)) :])
            for (number, key), value in zip(self.entries, entries, strict=True):
                _put(reachable, number, key, value)
        _overwrite(self.written, written, module, args)
        for path, record in zip(self.hooks, records, strict=True):
            _fire_hooks(module.get_submodule(path), record)
        return result


_EMPTY = nn.Identity()


def _attribute_restorer(holder: nn.Module, name: str) -> Callable[[], None]:
    place: dict[str, Any] = holder._buffers if name in holder._buffers else holder.__dict__
    old = place.get(name, _MISSING)

    def restore() -> None:
        if old is _MISSING:
            place.pop(name, None)
        else:
            place[name] = old

    return restore


def _content_restorer(container: Any) -> Callable[[], None]:
    if isinstance(container, list):
        kept = list(container)
        return lambda: container.__setitem__(slice(None), kept)
    entries: dict[Any, Any] = container
    saved = dict(entries)

    def restore() -> None:
        for key in [key for key in container if key not in saved]:
            del container[key]
        for key, value in saved.items():
            if container.get(key, _MISSING) is not value:
                container[key] = value

    return restore


def _entry(reachable: Sequence[Any], number: int, key: Any) -> Any:
    try:
        return reachable[number][key]
    except (IndexError, KeyError):
        return None


def _put(reachable: Sequence[Any], number: int, key: Any, value: Any) -> None:
    if number >= len(reachable):
        return
    container = reachable[number]
    if isinstance(container, list) and key >= len(container):
        container.append(value)
    else:
        container[key] = value


def _overwrite(places: Sequence[tuple[str, Any]], values: Sequence[torch.Tensor], module: nn.Module, args: Any) -> None:
    if not places:
        return
    arguments = flatten(args)[1]
    with torch.no_grad():
        for (kind, key), value in zip(places, values, strict=True):
            if kind == "argument":
                if arguments[key] is not value:
                    arguments[key].copy_(value)
            elif not is_placeholder(value):  # an own buffer keeps its old content rather than an unknown one
                module.get_buffer(key).copy_(value)


def _fire_hooks(module: nn.Module, record: Any) -> None:
    args, output = record
    for hook_id, hook in list(module._forward_hooks.items()):
        if hook_id in module._forward_hooks_with_kwargs:
            hook(module, args, {}, output)
        else:
            hook(module, args, output)


class HookRecorder:
    """Records what the forward hooks inside a unit are given."""

    def __init__(self, module: nn.Module) -> None:
        self.paths: list[str] = []
        self.records: list[tuple[Any, Any]] = []
        self._module = module
        self._handles: list[Any] = []

    def __enter__(self) -> HookRecorder:
        for path, module in list(self._module.named_modules()):
            if module._forward_hooks:
                self._handles.append(module.register_forward_hook(self._remember(path), prepend=True))
        return self

    def _remember(self, path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.paths.append(path)
            self.records.append((args, output))

        return hook

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()


def containers_of(args: Any, module: nn.Module) -> list[Any]:
    """Lists, dicts and plain objects that a call can write into: of its arguments, then of the unit's attributes."""
    found: list[Any] = []
    seen: set[int] = set()

    def walk(item: Any, depth: int) -> None:
        if depth > 5 or id(item) in seen or isinstance(item, torch.Tensor | nn.Module | str | int | float | type):
            return
        seen.add(id(item))
        if isinstance(item, dict):
            found.append(item)
            for child in list(item.values()):
                walk(child, depth + 1)
        elif isinstance(item, list | tuple):
            if isinstance(item, list):
                found.append(item)
            for child in list(item):
                walk(child, depth + 1)
        elif hasattr(item, "__dict__") and not callable(item) and not _is_torch_object(item):
            found.append(vars(item))
            for child in list(vars(item).values()):
                walk(child, depth + 1)

    walk(args, 0)
    for submodule in module.modules():
        for name, value in list(vars(submodule).items()):
            if name not in _PLUMBING and isinstance(value, list | dict):
                walk(value, 1)
    return found


def _is_torch_object(item: Any) -> bool:
    return type(item).__module__.split(".")[0] == "torch"


class Observation:
    """Watches one call of a unit in a trace, and reports its effects.

    Args:
        module: The unit.
        args: ``(args, kwargs)`` of the call.
        version: Number of in-place writes into a tensor so far.
    """

    def __init__(self, module: nn.Module, args: Any, version: Callable[[torch.Tensor], int]) -> None:
        self._module = module
        self._args = args
        self._version = version
        self._attributes = self._read_attributes()
        self._containers = containers_of(args, module)
        self._argument_containers = len(containers_of(args, _EMPTY))
        self._contents = [dict(c) if isinstance(c, dict) else list(c) for c in self._containers]
        self._arguments = flatten(args)[1]
        self._buffers = dict(module.named_buffers())
        self._versions = [version(tensor) for tensor in [*self._arguments, *self._buffers.values()]]

    def _read_attributes(self) -> dict[tuple[str, str], Any]:
        found = {}
        for path, module in self._module.named_modules():
            for name, value in list(vars(module).items()):
                if name not in _PLUMBING:
                    found[path, name] = value
            for name, value in module._buffers.items():
                found[path, name] = value
        return found

    def finish(self, result: Any, hooks: HookRecorder) -> tuple[Effects, list[torch.Tensor]]:
        """Effects of the finished call, and its visible tensors in template order."""
        after = self._read_attributes()
        attributes = [place for place, value in after.items() if self._attributes.get(place, _MISSING) is not value]
        # Plain constants that a unit keeps to itself (a call counter) are its own business on its own stage.
        attributes = [place for place in attributes if tensors_in(after[place])]
        entries = [
            (number, key)
            for number, key in self._changed_entries()
            if number < self._argument_containers or tensors_in(self._containers[number][key])
        ]
        written = self._written()
        values = [after[place] for place in attributes]
        contents = [self._containers[number][key] for number, key in entries]
        template, tensors = flatten((result, values, contents, hooks.records, [tensor for _, tensor in written]))
        effects = Effects(
            template, tuple(attributes), tuple(entries), tuple(hooks.paths), tuple(place for place, _ in written)
        )
        return effects, tensors

    def _changed_entries(self) -> list[tuple[int, Any]]:
        changed: list[tuple[int, Any]] = []
        for number, (container, before) in enumerate(zip(self._containers, self._contents, strict=True)):
            if isinstance(container, dict) and isinstance(before, dict):
                changed += [(number, k) for k, v in container.items() if before.get(k, _MISSING) is not v]
            elif len(container) >= len(before):
                changed += [
                    (number, position)
                    for position, value in enumerate(container)
                    if position >= len(before) or before[position] is not value
                ]
        return changed

    def _written(self) -> list[tuple[tuple[str, Any], torch.Tensor]]:
        places: list[tuple[str, Any]] = [("argument", i) for i in range(len(self._arguments))]
        places += [("buffer", name) for name in self._buffers]
        tensors = [*self._arguments, *self._buffers.values()]
        return [
            (place, tensor)
            for place, tensor, before in zip(places, tensors, self._versions, strict=True)
            if self._version(tensor) != before
        ]


_MISSING = Constant(None)
