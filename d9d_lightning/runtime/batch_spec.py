"""What the caller says of single fields of a batch: ``batch_spec``, and the cuts that it asks for.

``batch_spec`` is a prefix of the batch: a dictionary by field name (also for named tuples and dataclasses), a list or
tuple by position, or one specification for everything below. Fields that it leaves out, or names with None, are read
from the batch itself.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from d9d_lightning.errors import PipelineConfigurationError
from d9d_lightning.runtime.batch_tree import Kind, Node, are_alike
from d9d_lightning.runtime.containers import is_sequence, open_container
from d9d_lightning.runtime.sharding import ShardingSpecLeaf, SpecReplicate, SpecShard

__all__ = ["Cut", "How", "cut_by_spec", "resolve_specs", "spec_sizes"]


class How(enum.Enum):
    """What becomes of one part of a batch in a microbatch."""

    KEEP = "every microbatch gets all of it"
    ROWS = "an array is cut along a dim"
    ITEMS = "a list of samples is cut along its length"
    OPEN = "a container is rebuilt around its cut children"


@dataclass(frozen=True, slots=True)
class Cut:
    """What becomes of one node.

    Attributes:
        how: The treatment.
        dim: The dim of ``ROWS``.
        rows_per_sample: How many rows, or items, belong to one sample.
        children: One cut for each child, for ``OPEN``.
    """

    how: How
    dim: int = 0
    rows_per_sample: int = 1
    children: tuple[Cut, ...] = ()


def resolve_specs(node: Node, spec: Any) -> dict[str, ShardingSpecLeaf]:
    """Finds the node that each specification speaks for.

    Args:
        node: The batch.
        spec: The caller's ``batch_spec``.

    Returns:
        Specifications by the path of their node.

    Raises:
        PipelineConfigurationError: The specification does not fit the structure of the batch.
    """
    if spec is None:
        return {}
    if isinstance(spec, (SpecShard, SpecReplicate)):
        return {node.path: spec}
    given = _named_specs(node, spec)
    children = dict(zip(node.opened.keys, node.children, strict=True)) if node.opened and node.children else {}
    known = [key for key in given if key in children]
    if given and not known:
        raise PipelineConfigurationError(
            f"batch_spec names {', '.join(map(repr, given))}, but {node.path} is a {type(node.value).__name__} with "
            f"{', '.join(map(repr, children)) or 'no fields'}; name at least one field that it has"
        )
    found: dict[str, ShardingSpecLeaf] = {}
    for key in known:
        found.update(resolve_specs(children[key], given[key]))
    return found


def _named_specs(node: Node, spec: Any) -> dict[Any, Any]:
    if is_sequence(spec):
        if node.kind is not Kind.SEQUENCE or len(spec) != node.length:
            size = f" with {node.length} items" if node.kind is Kind.SEQUENCE else ""
            raise PipelineConfigurationError(
                f"batch_spec gives {len(spec)} specifications by position, but {node.path} is a "
                f"{type(node.value).__name__}{size}; give one for each item, None for those to be read from the batch"
            )
        return dict(enumerate(spec))
    opened = open_container(spec)
    if opened is None:
        raise PipelineConfigurationError(
            f"batch_spec holds {spec!r} for {node.path}; expected SpecShard(), SpecReplicate(), None, or a dictionary, "
            f"list or tuple of them"
        )
    return dict(zip(opened.keys, opened.children, strict=True))


def spec_sizes(node: Node, spec: ShardingSpecLeaf) -> set[int]:
    """Sizes along which a node would be cut by a specification.

    Raises:
        PipelineConfigurationError: The node has no such dim, or the specification asks for stacking.
    """
    if isinstance(spec, SpecReplicate):
        return set()
    if spec.do_stack:
        raise PipelineConfigurationError(
            f"batch_spec for {node.path} is {spec}, but a microbatch keeps the batch dim; use SpecShard({spec.dim})"
        )
    if node.kind is Kind.ARRAY:
        return {int(node.value.shape[_dim_of(node, spec)])}
    if node.kind is Kind.SEQUENCE:
        return {_length_of(node, spec)}
    if node.kind is Kind.FIELDS:
        return {size for child in node.children for size in spec_sizes(child, spec)}
    if node.kind in (Kind.SCALAR, Kind.SEALED):
        raise _cannot_cut(node, spec)
    return set()


def cut_by_spec(node: Node, spec: ShardingSpecLeaf, size: int) -> Cut:
    """The cut that a specification asks for, at a batch size.

    Raises:
        PipelineConfigurationError: The size of the node is no multiple of the batch size.
    """
    if isinstance(spec, SpecReplicate) or node.kind is Kind.LEAF:
        return Cut(How.KEEP)
    if node.kind is Kind.FIELDS:
        return Cut(How.OPEN, children=tuple(cut_by_spec(child, spec, size) for child in node.children))
    if node.kind is Kind.SEQUENCE:
        return Cut(How.ITEMS, rows_per_sample=_rows_per_sample(node, _length_of(node, spec), size))
    dim = _dim_of(node, spec)
    return Cut(How.ROWS, dim, _rows_per_sample(node, int(node.value.shape[dim]), size))


def _dim_of(node: Node, spec: SpecShard) -> int:
    dims = len(node.value.shape)
    if not node.can_be_cut or not -dims <= spec.dim < dims:
        raise _cannot_cut(node, spec)
    return spec.dim % dims


def _length_of(node: Node, spec: SpecShard) -> int:
    if spec.dim != 0:
        raise _cannot_cut(node, spec)
    if not are_alike(node.children):
        raise PipelineConfigurationError(
            f"batch_spec gives {spec} to {node.path}, a {type(node.value).__name__} of {node.length} items that are no "
            f"samples of one kind; give one specification for each item: [{', '.join(['SpecShard()'] * node.length)}]"
        )
    return node.length


def _rows_per_sample(node: Node, length: int, size: int) -> int:
    if size == 0 or length % size:
        raise PipelineConfigurationError(
            f"batch_spec cuts {node.path} along a size of {length}, which is no multiple of {size}, the smallest size "
            f"that it names; give SpecReplicate() to the parts that every microbatch needs whole"
        )
    return length // size


def _cannot_cut(node: Node, spec: SpecShard) -> PipelineConfigurationError:
    shape = f" of shape {tuple(node.value.shape)}" if node.kind in (Kind.ARRAY, Kind.SCALAR) else ""
    return PipelineConfigurationError(
        f"batch_spec gives {spec} to {node.path}, a {type(node.value).__name__}{shape} that cannot be cut so; give "
        f"SpecReplicate() or another dim"
    )
