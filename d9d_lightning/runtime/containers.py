"""Containers of a batch: how one is opened into its children, and rebuilt as the same type around new ones.

Known containers are mappings, lists, tuples, named tuples, dataclasses and ``types.SimpleNamespace``. Anything else is
a leaf. A rebuilt container is always a new object, so that a step may ``pop`` from it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence

__all__ = ["OpenContainer", "copy_containers", "holds_tensor", "is_sequence", "map_leaves", "open_container"]

_MUTABLE_LEAVES = (set, deque, bytearray)


@dataclasses.dataclass(frozen=True, slots=True)
class OpenContainer:
    """A container taken apart.

    Attributes:
        keys: What finds each child: a mapping key, a position, or a field name.
        labels: How each child is written behind its parent, for messages: ``['x']``, ``[0]`` or ``.x``.
        children: The children, in the order of ``keys``.
        rebuild: Makes a new container of the same type from new children, given in the same order.
    """

    keys: tuple[Any, ...]
    labels: tuple[str, ...]
    children: tuple[Any, ...]
    rebuild: Callable[[Sequence[Any]], Any]


def is_sequence(value: Any) -> bool:
    """Whether a value is a list or tuple whose positions are not named fields."""
    return isinstance(value, (list, tuple)) and not hasattr(value, "_fields") and not isinstance(value, torch.Size)


def open_container(value: Any) -> OpenContainer | None:
    """Takes a container apart; None when the value is a leaf."""
    if isinstance(value, (torch.Tensor, str, bytes, torch.Size, PackedSequence)):
        return None
    if isinstance(value, Mapping):
        return _open_mapping(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _open_fields(value, tuple(value._fields), lambda children: type(value)(*children))
    if isinstance(value, (list, tuple)):
        labels = tuple(f"[{position}]" for position in range(len(value)))
        return OpenContainer(tuple(range(len(value))), labels, tuple(value), lambda items: _like_sequence(value, items))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value) if hasattr(value, field.name))
        return _open_fields(value, names, lambda children: _copy_with(value, names, children))
    if type(value) is SimpleNamespace:
        names = tuple(vars(value))
        return _open_fields(value, names, lambda children: _copy_with(value, names, children))
    return None


def copy_containers(value: Any) -> Any:
    """A private copy of a value: every container is new, every tensor and opaque leaf is the same object."""
    opened = open_container(value)
    if opened is not None:
        return opened.rebuild([copy_containers(child) for child in opened.children])
    if isinstance(value, _MUTABLE_LEAVES):
        return copy.copy(value)
    if _is_plain_object(value) and holds_tensor(value):
        # A graph or a structure of the user's own: a step that assigns `batch.x = ...` must not change the original.
        return copy.copy(value)
    return value


def map_leaves(value: Any, function: Callable[[Any], Any]) -> Any:
    """A copy of a value with new containers and ``function`` of every leaf."""
    opened = open_container(value)
    if opened is None:
        return function(value)
    return opened.rebuild([map_leaves(child, function) for child in opened.children])


def holds_tensor(value: Any, depth: int = 4) -> bool:
    """Whether a tensor, or an iterator that could yield one, is found in a value or its attributes.

    Args:
        value: Anything.
        depth: How many levels of attributes and containers to look through.
    """
    if isinstance(value, (torch.Tensor, PackedSequence, Iterator)):
        return True
    if depth == 0 or isinstance(value, (str, bytes, int, float, complex, type, np.ndarray, torch.nn.Module)):
        return False
    opened = open_container(value)
    if opened is not None:
        inner: Sequence[Any] = opened.children
    elif isinstance(value, (set, frozenset, deque)):
        inner = tuple(value)
    else:
        inner = tuple(vars(value).values()) if hasattr(value, "__dict__") else _slot_values(value)
    return any(holds_tensor(item, depth - 1) for item in inner)


def _open_fields(value: Any, names: tuple[str, ...], rebuild: Callable[[Sequence[Any]], Any]) -> OpenContainer:
    children = tuple(getattr(value, name) for name in names)
    return OpenContainer(names, tuple(f".{name}" for name in names), children, rebuild)


def _open_mapping(value: Mapping[Any, Any]) -> OpenContainer | None:
    if not isinstance(value, (dict, UserDict)) and not _can_be_built_anew(value):
        return None
    keys = tuple(value)
    labels = tuple(f"[{key!r}]" for key in keys)
    return OpenContainer(
        keys, labels, tuple(value[key] for key in keys), lambda items: _like_mapping(value, keys, items)
    )


def _can_be_built_anew(value: Mapping[Any, Any]) -> bool:
    build: Callable[[dict[Any, Any]], Any] = type(value)
    try:
        return set(build(dict(value))) == set(value)
    except (TypeError, ValueError, AttributeError, KeyError):
        return False


def _like_mapping(value: Mapping[Any, Any], keys: tuple[Any, ...], children: Sequence[Any]) -> Any:
    items = dict(zip(keys, children, strict=True))
    if type(value) is dict:
        return items
    if isinstance(value, (dict, UserDict)):
        # These copy their store, and with it a default factory or attributes beside the items.
        copied = copy.copy(value)
        for key, child in items.items():
            copied[key] = child
        return copied
    build: Callable[[dict[Any, Any]], Any] = type(value)
    return build(items)


def _like_sequence(value: Any, items: Sequence[Any]) -> Any:
    if type(value) in (list, tuple):
        return type(value)(items)
    if isinstance(value, list):
        copied = copy.copy(value)
        copied[:] = items
        return copied
    build: Callable[[Sequence[Any]], Any] = type(value)
    try:
        return build(list(items))
    except TypeError:
        # A tuple with a constructor of its own (torch.return_types fixes the length): the items are what matters.
        return tuple(items)


def _copy_with(value: Any, names: tuple[str, ...], children: Sequence[Any]) -> Any:
    copied = copy.copy(value)
    for name, child in zip(names, children, strict=True):
        # object.__setattr__ so that frozen dataclasses can be rebuilt without running their __init__ again.
        object.__setattr__(copied, name, child)
    return copied


def _is_plain_object(value: Any) -> bool:
    if not hasattr(value, "__dict__") or isinstance(value, (torch.Tensor, torch.nn.Module, tuple, type, Iterator)):
        return False
    names = {name for kind in type(value).__mro__[:-1] for name in vars(kind)}
    return "__copy__" in names or not names & {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"}


def _slot_values(value: Any) -> tuple[Any, ...]:
    names = [name for kind in type(value).__mro__ for name in _as_names(getattr(kind, "__slots__", ()))]
    return tuple(getattr(value, name) for name in names if hasattr(value, name))


def _as_names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)
