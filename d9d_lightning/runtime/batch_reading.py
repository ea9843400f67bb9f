"""What the batch size is, and which parts of a batch are cut along it.

A *reading* is a batch size together with what it makes of every part. A reading is consistent when it leaves no array
uncut. Lightning's own rule (the first tensor's dim 0) decides wherever all arrays agree; a list of samples that nobody
could stack (images of several sizes, one dict of targets for each image) is read by its length. Where two consistent
readings remain, the caller has to say which one is meant: a wrong guess would train on garbage without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from d9d_lightning.runtime.batch_spec import Cut, How, cut_by_spec, spec_sizes
from d9d_lightning.runtime.batch_tree import Kind, Node, are_alike, are_ragged, walk
from d9d_lightning.runtime.sharding import ShardingSpecLeaf

__all__ = ["Finding", "Reading", "find_reading", "parts_without_spec", "read"]


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
        unclear: Sequences that could as well be the other thing: samples, or fields.
        leftovers: How many lists without arrays have another length.
    """

    size: int
    cut: Cut = _KEEP
    uncut: list[Node] = field(default_factory=list)
    sealed: list[Node] = field(default_factory=list)
    sliced: list[Node] = field(default_factory=list)
    unclear: list[Node] = field(default_factory=list)
    leftovers: int = 0

    def absorb(self, other: Reading) -> None:
        """Adds what was found in a part of the batch."""
        self.uncut += other.uncut
        self.sealed += other.sealed
        self.sliced += other.sliced
        self.unclear += other.unclear
        self.leftovers += other.leftovers


@dataclass(frozen=True, slots=True)
class Finding:
    """What the search for the batch size came to: a reading, a reason why there is none, or a conflict.

    Attributes:
        reading: The reading that holds.
        reason: Why nothing can be cut.
        conflict: Why the caller has to decide.
    """

    reading: Reading | None = None
    reason: str | None = None
    conflict: str | None = None


def read(root: Node, size: int, specs: Mapping[str, ShardingSpecLeaf]) -> Reading:
    """Reads a batch at a given batch size.

    Args:
        root: The batch.
        size: The batch size to try.
        specs: What the caller said of single parts, by path.
    """
    reading = Reading(size)
    beside_records = any(_is_list_of_records(node, size) for node in parts_without_spec(root, specs))
    reading.cut = _Reader(reading, specs, beside_records).cut(root)
    return reading


def find_reading(root: Node, specs: Mapping[str, ShardingSpecLeaf]) -> Finding:
    """Searches for the one reading of a batch.

    Args:
        root: The batch.
        specs: What the caller said of single parts, by path. Sizes that the caller gave decide alone.

    Raises:
        PipelineConfigurationError: A specification does not fit its part.
    """
    given = sorted({size for node in walk(root) if node.path in specs for size in spec_sizes(node, specs[node.path])})
    if given:
        reading = read(root, given[0], specs)
        return Finding(reason=_describe_sealed(reading.sealed)) if reading.sealed else Finding(reading)
    parts = list(parts_without_spec(root, specs))
    readings = [read(root, size, specs) for size in sorted(_candidate_sizes(parts))]
    consistent = [reading for reading in readings if not reading.uncut]
    cuttable = [reading for reading in consistent if not reading.sealed]
    if cuttable:
        return _choose(cuttable, {node.length for node in parts if node.kind is Kind.ARRAY})
    sealed = [node for node in parts if node.kind is Kind.SEALED] or [n for r in consistent for n in r.sealed]
    if sealed:
        return Finding(reason=_describe_sealed(sealed))
    if readings:
        return Finding(conflict=_describe_sizes(parts))
    return Finding(reason="no part of the batch can be cut")


def parts_without_spec(root: Node, specs: Mapping[str, ShardingSpecLeaf]) -> Iterator[Node]:
    """Yields every node that the caller did not speak for, parents first."""
    if root.path in specs:
        return
    yield root
    for child in root.children:
        yield from parts_without_spec(child, specs)


def _candidate_sizes(parts: list[Node]) -> set[int]:
    sizes = {node.length for node in parts if node.kind is Kind.ARRAY}
    for node in parts:
        holds_tensors = node.has_arrays or any(child.kind is Kind.SCALAR for child in node.children)
        if node.kind is Kind.SEQUENCE and node.children and holds_tensors and are_alike(node.children):
            sizes.add(node.length)
    return sizes


def _choose(readings: list[Reading], dims: set[int]) -> Finding:
    lightnings = next((reading for reading in readings if dims == {reading.size}), None)
    if lightnings is None:
        fewest = min(reading.leftovers for reading in readings)
        best = [reading for reading in readings if reading.leftovers == fewest]
        return _unless_unclear(best[0], best[1:])
    others = [reading for reading in readings if reading is not lightnings]
    rivals = [other for other in others if _is_serious(other) or other.leftovers < lightnings.leftovers]
    if len(rivals) == 1 and _is_serious(rivals[0]) and rivals[0].leftovers < lightnings.leftovers:
        return _unless_unclear(rivals[0], [])
    return _unless_unclear(lightnings, rivals)


def _unless_unclear(reading: Reading, rivals: list[Reading]) -> Finding:
    if rivals:
        return Finding(conflict=_describe_readings([reading, *rivals]))
    if reading.unclear:
        path = reading.unclear[0].path
        return Finding(conflict=f"{path} may be a list of {reading.size} samples, or of fields of {reading.size} rows")
    return Finding(reading)


def _is_serious(reading: Reading) -> bool:
    """Whether a list read as samples looks enough like samples to doubt that all arrays share dim 0 by design."""
    return any(_looks_like_samples(node) for node in reading.sliced)


def _looks_like_samples(node: Node) -> bool:
    first = next(child for child in node.children if child.value is not None)
    if first.kind is Kind.FIELDS:
        return node.length > 1 and are_alike(node.children, same_keys=True)
    if first.kind is Kind.ARRAY:
        ragged = are_ragged(node.children)
        # [source, target] is how default_collate returns two fields; three and more RGB images are not.
        return ragged and (not node.is_root or (node.length > 2 and _is_image(first)))
    return are_ragged(node.children) or any(_is_single_number(child) for child in first.children)


def _is_image(node: Node) -> bool:
    return len(node.value.shape) == 3 and node.length == 3


def _is_single_number(node: Node) -> bool:
    return node.kind is Kind.SCALAR or isinstance(node.value, (int, float))


def _is_list_of_records(node: Node, size: int) -> bool:
    return (
        node.kind is Kind.SEQUENCE
        and not node.is_root
        and node.has_arrays
        and node.length == size
        and any(child.kind is Kind.FIELDS for child in node.children)
        and are_alike(node.children)
    )


def _describe_sealed(nodes: list[Node]) -> str:
    kinds = f"a {type(nodes[0].value).__name__}"
    return f"{nodes[0].path} is {kinds}, which cannot be cut into samples"


def _describe_sizes(parts: list[Node]) -> str:
    arrays = [node for node in parts if node.kind is Kind.ARRAY]
    named = ", ".join(f"{node.path} has {node.length}" for node in arrays[:6])
    return f"the sizes of dim 0 differ: {named}{', ...' if len(arrays) > 6 else ''}"


def _describe_readings(readings: list[Reading]) -> str:
    texts = []
    for reading in readings:
        lists = f" (taking {reading.sliced[0].path} as a list of samples)" if reading.sliced else " (taking dim 0)"
        texts.append(f"{reading.size}{lists}")
    return "the batch size may be " + " or ".join(texts)


class _Reader:
    """Decides what becomes of each node, and notes what does not fit."""

    def __init__(self, reading: Reading, specs: Mapping[str, ShardingSpecLeaf], beside_records: bool) -> None:
        self._reading = reading
        self._specs = specs
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
        inner = _Reader(Reading(self._reading.size), self._specs, self._beside_records)
        opened = inner._open(node)
        may_be_samples = node.length == self._reading.size and are_alike(node.children)
        if may_be_samples and not self._has_spec_inside(node) and self._is_list_of_samples(node, inner._reading):
            self._reading.sliced.append(node)
            return Cut(How.ITEMS)
        self._reading.absorb(inner._reading)
        return opened

    def _is_list_of_samples(self, node: Node, inside: Reading) -> bool:
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
