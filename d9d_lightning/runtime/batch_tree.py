"""A batch as a tree of nodes: what each part is, where it stands, and which sizes it could have.

The tree is looked at several times while the batch size is searched for, so it is built once, and holds the values
themselves by reference.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from d9d_lightning.runtime.containers import OpenContainer, holds_tensor, is_sequence, open_container

__all__ = ["Kind", "Node", "are_alike", "are_ragged", "build_tree", "walk"]


class Kind(enum.Enum):
    """What a part of a batch is."""

    ARRAY = "a tensor or numeric array with at least one dim"
    SCALAR = "a tensor without dims"
    FIELDS = "a container whose children have names"
    SEQUENCE = "a list or tuple"
    LEAF = "anything else: a number, a string, None, an object without tensors"
    SEALED = "an object that holds tensors, but cannot be taken apart"


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One part of a batch.

    Attributes:
        path: How a user would write it, for example ``batch['x'][0]``.
        value: The part itself.
        kind: What it is.
        opened: The container taken apart, for ``FIELDS`` and ``SEQUENCE``.
        children: One node for each child; empty for a sequence of strings and numbers, which never need a closer look.
        has_arrays: Whether an ``ARRAY`` or ``SEALED`` part is in it.
    """

    path: str
    value: Any
    kind: Kind
    opened: OpenContainer | None = None
    children: tuple[Node, ...] = ()
    has_arrays: bool = False

    @property
    def is_root(self) -> bool:
        """Whether this node is the whole batch."""
        return self.path == "batch"

    @property
    def length(self) -> int:
        """Number of items of a container, or size of dim 0 of an array."""
        if self.opened is not None:
            return len(self.opened.children)
        return int(self.value.shape[0])

    @property
    def can_be_cut(self) -> bool:
        """Whether rows of an array can be taken as a view; a sparse tensor has none."""
        return isinstance(self.value, np.ndarray) or bool(self.value.layout == torch.strided)


def build_tree(value: Any, path: str = "batch") -> Node:
    """Builds the tree of a batch, or of a part of it."""
    if isinstance(value, torch.Tensor) and value.is_nested:
        # It has no sizes to look at, and no rows that could be taken as a view.
        return Node(path, value, Kind.SEALED, has_arrays=True)
    if isinstance(value, torch.Tensor):
        kind = Kind.ARRAY if value.dim() > 0 else Kind.SCALAR
        return Node(path, value, kind, has_arrays=kind is Kind.ARRAY)
    if isinstance(value, np.ndarray) and value.ndim > 0 and value.dtype.kind in "biufc":
        return Node(path, value, Kind.ARRAY, has_arrays=True)
    opened = open_container(value)
    if opened is None:
        if holds_tensor(value):
            return Node(path, value, Kind.SEALED, has_arrays=True)
        return Node(path, value, Kind.LEAF)
    kind = Kind.SEQUENCE if is_sequence(value) else Kind.FIELDS
    if kind is Kind.SEQUENCE and all(isinstance(item, (str, int, float, bytes)) for item in opened.children):
        return Node(path, value, kind, opened)
    children = tuple(
        build_tree(child, path + label) for child, label in zip(opened.children, opened.labels, strict=True)
    )
    return Node(path, value, kind, opened, children, any(child.has_arrays for child in children))


def walk(node: Node) -> Iterator[Node]:
    """Yields a node and everything under it, parents first."""
    yield node
    for child in node.children:
        yield from walk(child)


def are_alike(nodes: tuple[Node, ...], same_keys: bool = False) -> bool:
    """Whether nodes could be samples of one kind: the same structure, dtypes, numbers of dims. None fits all.

    Args:
        nodes: The nodes.
        same_keys: Whether records must have the same keys; else they may lack some, as optional targets do.
    """
    present = [node for node in nodes if node.value is not None]
    return all(_have_one_form(present[0], other, same_keys) for other in present[1:])


def are_ragged(nodes: tuple[Node, ...]) -> bool:
    """Whether nodes of one form differ in the size of some array, as samples do that nobody could stack."""
    shapes = [_shapes(node) for node in nodes if node.value is not None]
    return any(shape != shapes[0] for shape in shapes[1:])


def _have_one_form(first: Node, second: Node, same_keys: bool) -> bool:
    if first.value is None or second.value is None:
        return True
    if first.kind is not second.kind:
        return False
    if first.kind is Kind.ARRAY:
        return bool(first.value.dtype == second.value.dtype and len(first.value.shape) == len(second.value.shape))
    if first.kind is Kind.SCALAR:
        return True
    if first.kind in (Kind.LEAF, Kind.SEALED):
        return type(first.value) is type(second.value) or _are_numbers(first.value, second.value)
    if type(first.value) is not type(second.value):
        return False
    fit = _records_fit if first.kind is Kind.FIELDS else _sequences_fit
    return fit(first, second, same_keys)


def _records_fit(first: Node, second: Node, same_keys: bool) -> bool:
    ours, theirs = _by_key(first), _by_key(second)
    common = ours.keys() & theirs.keys()
    enough = set(ours) == set(theirs) if same_keys else bool(common) or not ours or not theirs
    return enough and all(_have_one_form(ours[key], theirs[key], same_keys) for key in common)


def _sequences_fit(first: Node, second: Node, same_keys: bool) -> bool:
    # Lists inside samples may differ in length (boxes, words); their items need only be of one form.
    if len(first.children) == len(second.children):
        return all(_have_one_form(*pair, same_keys) for pair in zip(first.children, second.children, strict=True))
    return are_alike(first.children + second.children, same_keys)


def _by_key(node: Node) -> dict[Any, Node]:
    return dict(zip(node.opened.keys, node.children, strict=True)) if node.opened is not None else {}


def _are_numbers(first: Any, second: Any) -> bool:
    return isinstance(first, (int, float)) and isinstance(second, (int, float))


def _shapes(node: Node) -> list[tuple[int, ...]]:
    return [tuple(part.value.shape) for part in walk(node) if part.kind is Kind.ARRAY]
