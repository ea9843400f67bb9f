"""What the batch size is: the choice among the readings of a batch.

A reading is consistent when it leaves no array uncut. Lightning's own rule (the first tensor's dim 0) decides wherever
all arrays agree; a list of samples that nobody could stack (images of several sizes, one dict of targets for each
image) is read by its length. Where two consistent readings remain, the caller has to say which one is meant: a wrong
guess would train on garbage without a word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from d9d_lightning.runtime.batch_reader import Form, Reading, read
from d9d_lightning.runtime.batch_spec import How, spec_sizes
from d9d_lightning.runtime.batch_tree import Kind, Node, are_alike, are_ragged, walk
from d9d_lightning.runtime.sharding import ShardingSpecLeaf

__all__ = ["Finding", "find_reading"]


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


def find_reading(root: Node, specs: Mapping[str, ShardingSpecLeaf], form: Form | None = None) -> Finding:
    """Searches for the one reading of a batch.

    Args:
        root: The batch.
        specs: What the caller said of single parts, by path. Sizes that the caller gave decide alone.
        form: How earlier batches were read. A batch that can be read so is read so, also where sizes that happen to be
            equal (two samples and two fields, three images and three channels) would allow something else.

    Raises:
        PipelineConfigurationError: A specification does not fit its part.
    """
    given = sorted({size for node in walk(root) if node.path in specs for size in spec_sizes(node, specs[node.path])})
    if given:
        reading = read(root, given[0], specs, form or {})
        return Finding(reason=_describe_sealed(reading.sealed)) if reading.sealed else Finding(reading)
    if form:
        finding = _search(root, specs, form)
        if finding.conflict is None:
            return finding
    return _search(root, specs, {})


def _search(root: Node, specs: Mapping[str, ShardingSpecLeaf], form: Form) -> Finding:
    parts = list(_parts_to_cut(root, specs, form))
    readings = [read(root, size, specs, form) for size in sorted(_candidate_sizes(parts, form))]
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


def _parts_to_cut(root: Node, specs: Mapping[str, ShardingSpecLeaf], form: Form) -> Iterator[Node]:
    """Yields what the batch size can be told from: nothing inside a list that is known to be one of samples."""
    if root.path in specs:
        return
    yield root
    if form.get(root.path) is not How.ITEMS:
        for child in root.children:
            yield from _parts_to_cut(child, specs, form)


def _candidate_sizes(parts: list[Node], form: Form) -> set[int]:
    sizes = {node.length for node in parts if node.kind is Kind.ARRAY}
    for node in parts:
        if form.get(node.path) is How.OPEN:
            continue
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
        return not (node.is_root and node.length == 1) and are_alike(node.children, same_keys=True)
    if first.kind is Kind.ARRAY:
        ragged = are_ragged(node.children)
        # [source, target] is how default_collate returns two fields; three and more RGB images are not.
        return ragged and (not node.is_root or (node.length > 2 and _is_image(first)))
    return are_ragged(node.children) or any(_is_single_number(child) for child in first.children)


def _is_image(node: Node) -> bool:
    return len(node.value.shape) == 3 and node.length == 3


def _is_single_number(node: Node) -> bool:
    return node.kind is Kind.SCALAR or isinstance(node.value, (int, float))


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
