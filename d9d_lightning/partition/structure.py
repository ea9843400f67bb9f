"""Taking arbitrary Python results apart into tensors and a template, and putting them together again.

A unit may return a tensor, nested containers, a dataclass, a transformers ``ModelOutput``, a cache object, a
distribution. ``torch.utils._pytree`` knows only registered types and would treat the rest as opaque leaves, tensors
included, so the walk here also enters plain objects.
"""

from __future__ import annotations

import copy
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = [
    "Constant",
    "Leaf",
    "Node",
    "constant_key",
    "constants_differ",
    "copy_containers",
    "flatten",
    "tensors_in",
    "unflatten",
]

_MAX_DEPTH = 8
_ATOMS = (
    str, bytes, int, float, bool, complex, type, torch.dtype, torch.device, torch.Size, torch.Generator, nn.Module,
    types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, range, slice,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor: its position in the flat list. One tensor met twice has one position."""

    index: int


@dataclass(frozen=True, slots=True)
class Constant:
    """Anything that holds no tensor."""

    value: Any


@dataclass(frozen=True, slots=True)
class Node:
    """A container: how to rebuild it, and its children."""

    kind: str
    prototype: Any
    keys: tuple[Any, ...]
    children: tuple[Any, ...]


def flatten(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """A template of Leaf, Constant and Node, and the tensors it stands for, in order."""
    tensors: list[torch.Tensor] = []
    positions: dict[int, int] = {}
    active: set[int] = set()

    def walk(item: Any, depth: int) -> Any:
        if isinstance(item, torch.Tensor):
            if id(item) not in positions:
                positions[id(item)] = len(tensors)
                tensors.append(item)
            return Leaf(positions[id(item)])
        if item is None or isinstance(item, _ATOMS) or depth > _MAX_DEPTH or id(item) in active:
            return Constant(item)
        parts = _take_apart(item)
        if parts is None:
            return Constant(item)
        kind, keys, values = parts
        active.add(id(item))
        children = tuple([walk(child, depth + 1) for child in values])
        active.discard(id(item))
        if kind != "sequence" and kind != "dict" and all(isinstance(child, Constant) for child in children):
            return Constant(item)
        return Node(kind, _prototype(item, kind), keys, children)

    return walk(value, 0), tensors


def _take_apart(item: Any) -> tuple[str, tuple[Any, ...], list[Any]] | None:
    if isinstance(item, tuple) and hasattr(item, "_fields"):
        return "namedtuple", (), list(item)
    if isinstance(item, list | tuple):
        return "sequence", (), list(item)
    if isinstance(item, dict):
        extra = {k: v for k, v in getattr(item, "__dict__", {}).items() if k not in item}
        return ("dict", tuple(item.keys()), list(item.values())) if not extra else (
            "dict_object", (tuple(item.keys()), tuple(extra)), [*item.values(), *extra.values()]
        )  # fmt: skip
    if hasattr(item, "__dict__") and not callable(item):
        fields = {name: field for name, field in vars(item).items() if not name.startswith("__")}
        return "object", tuple(fields), list(fields.values())
    if hasattr(type(item), "__slots__") and not callable(item):
        names = [n for n in _slots(type(item)) if hasattr(item, n)]
        return ("object", tuple(names), [getattr(item, n) for n in names]) if names else None
    return None


def _slots(cls: type) -> list[str]:
    names: list[str] = []
    for base in cls.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names.extend([slots] if isinstance(slots, str) else slots)
    return names


def _prototype(item: Any, kind: str) -> Any:
    """What rebuilding needs of the original, without its tensors (a template may outlive the step by far)."""
    if kind in ("sequence", "namedtuple"):
        return type(item)
    if kind == "dict":
        return type(item) if type(item) in (dict,) else _emptied(item)
    return _emptied(item)


def _emptied(item: Any) -> Any:
    try:
        made = copy.copy(item)
    except Exception:  # objects may refuse to be copied in their own way; share them then
        return item
    if made is item:
        return item
    if isinstance(made, dict):
        _plain_dict(made).clear(made)
    mirrors = isinstance(made, dict)  # such classes fill their entries from the fields when they are copied
    for name, field in list(vars(made).items()) if hasattr(made, "__dict__") else []:
        if not name.startswith("__"):
            made.__dict__[name] = None if mirrors else _without_tensors(field)
    for name in () if mirrors else _slots(type(made)):
        if not name.startswith("__") and hasattr(made, name):
            object.__setattr__(made, name, _without_tensors(getattr(made, name)))
    return made


def _without_tensors(field: Any) -> Any:
    """What a field of a prototype holds until it is filled again; a container's own copying may ask for its kind."""
    if not isinstance(field, dict | list | tuple | torch.Tensor) or not tensors_in(field):
        return field
    return type(field)() if type(field) in (dict, list, tuple) else None


def _plain_dict(value: dict[Any, Any]) -> Any:
    """The class whose methods fill a dict without what its own class adds (checks, mirrors, a frozen state)."""
    return OrderedDict if isinstance(value, OrderedDict) else dict


def _fill(made: dict[Any, Any], keys: Sequence[Any], values: Sequence[Any]) -> None:
    put = _plain_dict(made).__setitem__
    for key, value in zip(keys, values, strict=True):
        put(made, key, value)


def unflatten(template: Any, tensors: Sequence[torch.Tensor] | Callable[[int], torch.Tensor]) -> Any:
    """The value that a template stands for, in new containers, around the given tensors."""
    get = tensors if callable(tensors) else tensors.__getitem__
    if isinstance(template, Leaf):
        return get(template.index)
    if isinstance(template, Constant):
        return template.value
    children = [unflatten(child, get) for child in template.children]
    return _put_together(template, children)


def _put_together(node: Node, children: list[Any]) -> Any:
    if node.kind == "sequence":
        return children if node.prototype is list else node.prototype(children)
    if node.kind == "namedtuple":
        return node.prototype(*children)
    if node.kind == "dict":
        if node.prototype is dict:
            return dict(zip(node.keys, children, strict=True))
        made = copy.copy(node.prototype)
        _fill(made, node.keys, children)
        _mirror_attributes(made)
        return made
    made = copy.copy(node.prototype)
    if node.kind == "dict_object":
        keys, names = node.keys
        _fill(made, keys, children[: len(keys)])
        made.__dict__.update((key, child) for key, child in zip(keys, children, strict=False) if key in made.__dict__)
        made.__dict__.update(zip(names, children[len(keys) :], strict=True))
        return made
    for name, child in zip(node.keys, children, strict=True):
        object.__setattr__(made, name, child)
    return made


def _mirror_attributes(made: Any) -> None:
    # transformers' ModelOutput keeps every entry as an attribute too
    attributes = getattr(made, "__dict__", None)
    if attributes:
        for key in [k for k in attributes if k in made]:
            attributes[key] = dict.__getitem__(made, key)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors anywhere inside a value."""
    if isinstance(value, torch.Tensor):
        return [value]
    return flatten(value)[1]


def constants_differ(expected: Any, got: Any) -> str | None:
    """Where two templates disagree in structure or in a plain constant, or None.

    Objects without tensors are compared by type only: their equality may be costly or undefined.
    """
    if type(expected) is not type(got):
        return f"{_describe(got)} instead of {_describe(expected)}"
    if isinstance(expected, Leaf):
        return None if expected.index == got.index else "the same tensor in another place"
    if isinstance(expected, Constant):
        old, new = expected.value, got.value
        if type(old) is not type(new):
            return f"{new!r} instead of {old!r}"
        plain = old is None or isinstance(old, bool | int | float | str | bytes | torch.Size)
        return f"{new!r} instead of {old!r}" if plain and old != new and not (old != old and new != new) else None
    if expected.keys != got.keys or len(expected.children) != len(got.children):
        return (
            f"entries {list(got.keys) or len(got.children)} instead of {list(expected.keys) or len(expected.children)}"
        )
    for old, new in zip(expected.children, got.children, strict=True):
        difference = constants_differ(old, new)
        if difference:
            return difference
    return None


def _describe(template: Any) -> str:
    if isinstance(template, Leaf):
        return "a tensor"
    if isinstance(template, Constant):
        return repr(template.value)
    return f"a {template.kind}"


def copy_containers(value: Any, change: Callable[[torch.Tensor], torch.Tensor] | None = None) -> Any:
    """The same value in new containers: a step may pop from its batch, and run more than once.

    Args:
        value: Any batch.
        change: Applied to each tensor, to clone those that the step writes into.
    """
    if isinstance(value, torch.Tensor):
        return value if change is None else change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[copy_containers(item, change) for item in value])
    if type(value) in (list, tuple):
        return type(value)(copy_containers(item, change) for item in value)
    if type(value) is dict:
        return {key: copy_containers(item, change) for key, item in value.items()}
    if value is None or isinstance(value, _ATOMS):
        return value
    template, tensors = flatten(value)
    if isinstance(template, Constant):
        return _emptied_keep(value)
    return unflatten(template, tensors if change is None else [change(t) for t in tensors])


def _emptied_keep(value: Any) -> Any:
    try:
        return copy.copy(value)
    except Exception:  # see _emptied
        return value


def constant_key(template: Any) -> Any:
    """A hashable key of a template: its form, and constants that decide how a step runs.

    Strings and floats vary from batch to batch without changing what is called, so only their type counts.
    """
    if isinstance(template, Leaf):
        return template.index
    if isinstance(template, Constant):
        value = template.value
        return (value,) if value is None or isinstance(value, bool | int) else type(value).__name__
    if template.prototype is list and all(isinstance(child, Constant) for child in template.children):
        return ("list", len(template.children))  # sample numbers, names: one for each sample
    try:
        keys = template.keys if hash(template.keys) is not None else ()
    except TypeError:
        keys = (len(template.keys),)
    return (template.kind, keys, tuple([constant_key(child) for child in template.children]))
