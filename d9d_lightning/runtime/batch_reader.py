"""One reading of a batch: a batch size, and what it makes of every part.

A tensor with as many rows as samples is cut. A list or tuple of such tensors is a container; a list of as many other
items is a list of samples and is cut along its length. The rest is kept. Nothing is decided here: what does not fit is
noted, and :mod:`d9d_lightning.runtime.batch_reading` chooses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from d9d_lightning.runtime.batch_spec import Cut, How, cut_by_spec
from d9d_lightning.runtime.batch_tree import Kind, Node, are_alike, are_ragged, walk
from d9d_lightning.runtime.sharding import ShardingSpecLeaf

__all__ = ["Form", "Reading", "read"]

Form = Mapping[str, How]
"""How sequences are read, by path: ``ITEMS`` for a list of samples, ``OPEN`` for fields."""

_KEEP = Cut(How.KEEP)


@dataclass(slots=True)
class Reading:
    """A batch size, and what it makes of every part.

    Attributes:
        size: The batch size.
        cut: What becomes of the whole batch; set by :func:`read`.
        uncut: Arrays that are neither cut along the batch size nor part of a sample.
        sealed: Parts that belong to samples, but cannot be cut.
        sliced: Sequences that hold arrays and are read as lists of samples.
        opened: Sequences that hold arrays and are read as fields.
        unclear: Sequences that could as well be the other thing: samples, or fields.
        leftovers: How many lists without arrays have another length.
    """

    size: int
    cut: Cut = _KEEP
    uncut: list[Node] = field(default_factory=list)
    sealed: list[Node] = field(default_factory=list)
    sliced: list[Node] = field(default_factory=list)
    opened: list[Node] = field(default_factory=list)
    unclear: list[Node] = field(default_factory=list)
    leftovers: int = 0

    def absorb(self, other: Reading) -> None:
        """Adds what was found in a part of the batch."""
        self.uncut += other.uncut
        self.sealed += other.sealed
        self.sliced += other.sliced
        self.opened += other.opened
        self.unclear += other.unclear
        self.leftovers += other.leftovers

    @property
    def form(self) -> Form:
        """How each sequence that holds arrays is read."""
        return {node.path: How.ITEMS for node in self.sliced} | {node.path: How.OPEN for node in self.opened}


def read(root: Node, size: int, specs: Mapping[str, ShardingSpecLeaf], form: Form) -> Reading:
    """Reads a batch at a given batch size.

    Args:
        root: The batch.
        size: The batch size to try.
        specs: What the caller said of single parts, by path.
        form: How earlier batches were read.
    """
    reading = Reading(size)
    beside_records = any(_is_list_of_records(node, size) for node in _parts_without_spec(root, specs))
    reading.cut = _Reader(reading, specs, form, beside_records).cut(root)
    return reading


class _Reader:
    """Decides what becomes of each node, and notes what does not fit."""

    def __init__(
        self, reading: Reading, specs: Mapping[str, ShardingSpecLeaf], form: Form, beside_records: bool
    ) -> None:
        self._reading = reading
        self._specs = specs
        self._form = form
        self._beside_records = beside_records

    def cut(self, node: Node) -> Cut:
        if node.path in self._specs:
            return cut_by_spec(node, self._specs[node.path], self._reading.size)
        if node.kind is Kind.SEALED:
            self._reading.sealed.append(node)
        elif node.kind is Kind.ARRAY:
            return self._cut_array(node)
        elif node.kind is Kind.FIELDS:
            return self._open(node)
        elif node.kind is Kind.SEQUENCE:
            return self._cut_sequence(node) if node.has_arrays else self._cut_plain_sequence(node)
        elif isinstance(node.value, np.ndarray) and node.value.shape[:1] == (self._reading.size,):
            return Cut(How.ROWS)
        return Cut(How.KEEP)

    def _cut_array(self, node: Node) -> Cut:
        if node.length != self._reading.size:
            self._reading.uncut.append(node)
        elif not node.can_be_cut:
            self._reading.sealed.append(node)
        else:
            return Cut(How.ROWS)
        return Cut(How.KEEP)

    def _open(self, node: Node) -> Cut:
        return Cut(How.OPEN, children=tuple(self.cut(child) for child in node.children))

    def _cut_plain_sequence(self, node: Node) -> Cut:
        if node.length == self._reading.size and not self._has_spec_inside(node):
            return Cut(How.ITEMS)
        self._reading.leftovers += node.length > 1
        return self._open(node) if node.children else Cut(How.KEEP)

    def _cut_sequence(self, node: Node) -> Cut:
        inner = _Reader(Reading(self._reading.size), self._specs, self._form, self._beside_records)
        cut = inner._open(node)
        may_be_samples = node.length == self._reading.size and are_alike(node.children)
        if may_be_samples and not self._has_spec_inside(node) and self._is_list_of_samples(node, inner._reading):
            self._reading.sliced.append(node)
            return Cut(How.ITEMS)
        self._reading.absorb(inner._reading)
        self._reading.opened.append(node)
        return cut

    def _is_list_of_samples(self, node: Node, inside: Reading) -> bool:
        if node.path in self._form:
            return self._form[node.path] is How.ITEMS
        if inside.uncut or inside.sealed:
            return True
        if not are_alike(node.children, same_keys=True):
            return False
        if any(child.kind is Kind.FIELDS for child in node.children):
            if node.is_root:
                self._reading.unclear.append(node)
            return True
        if node.is_root:
            return False
        if not self._beside_records and node.length > 1 and are_ragged(node.children):
            self._reading.unclear.append(node)
        return self._beside_records

    def _has_spec_inside(self, node: Node) -> bool:
        return bool(self._specs) and any(part.path in self._specs for part in walk(node))


def _parts_without_spec(root: Node, specs: Mapping[str, ShardingSpecLeaf]) -> Iterator[Node]:
    """Yields every node that the caller did not speak for, parents first."""
    if root.path in specs:
        return
    yield root
    for child in root.children:
        yield from _parts_without_spec(child, specs)


def _is_list_of_records(node: Node, size: int) -> bool:
    return (
        node.kind is Kind.SEQUENCE
        and not node.is_root
        and node.has_arrays
        and node.length == size
        and any(child.kind is Kind.FIELDS for child in node.children)
        and are_alike(node.children)
    )
