"""How one whole-batch value relates to its shards: the specifications, and the split and merge that follow them.

A specification is either :class:`SpecShard` (the value is cut) or :class:`SpecReplicate` (every shard sees all of it).
Specifications form a tree with the structure of the value: a dictionary by key or field name for mappings, named tuples
and dataclasses, a list or tuple by position for sequences. One leaf may stand for a whole subtree: it then holds for
every field below, while a list or tuple under it is cut along its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from d9d_lightning.errors import PipelineStateError
from d9d_lightning.runtime.containers import OpenContainer, is_sequence, open_container

__all__ = ["ShardingSpecLeaf", "SpecReplicate", "SpecShard", "shard_bounds", "shard_tree", "unshard_tree"]


@dataclass(frozen=True, slots=True)
class SpecShard:
    """The value is cut into shards.

    Attributes:
        dim: Dim of a tensor that is cut. A list or tuple is cut along its length, its dim 0.
        do_stack: Each shard is one element of ``dim``, with the dim removed; merging stacks the shards.
    """

    dim: int = 0
    do_stack: bool = False


@dataclass(frozen=True, slots=True)
class SpecReplicate:
    """Every shard sees the whole value."""


ShardingSpecLeaf = SpecShard | SpecReplicate
"""What may stand at a leaf of a specification tree."""


def shard_bounds(size: int, num_shards: int) -> list[tuple[int, int]]:
    """Start and stop of each shard, by the rule of ``torch.tensor_split``: the first ``size % num_shards`` are larger.

    Args:
        size: Number of rows.
        num_shards: Number of shards; those beyond ``size`` are empty.
    """
    small, larger = divmod(size, num_shards)
    starts = [index * small + min(index, larger) for index in range(num_shards + 1)]
    return [(starts[index], starts[index + 1]) for index in range(num_shards)]


def shard_tree(tree: Any, sharding_spec: Any, num_shards: int, enforce_even_split: bool = False) -> tuple[Any, ...]:
    """Cuts a whole-batch value into shards.

    Args:
        tree: The value; tensors, arrays, lists and containers of them.
        sharding_spec: Specifications with the structure of the value, or a prefix of it.
        num_shards: Number of shards.
        enforce_even_split: Refuse a size that is no multiple of ``num_shards``, instead of cutting it by the rule of
            ``torch.tensor_split``.

    Returns:
        One tree for each shard. Shards of tensors are views; replicated values are the same object in every shard.

    Raises:
        PipelineStateError: The structures differ, a value cannot be cut as told, or a size is uneven though even ones
            are enforced.
    """
    if num_shards < 1:
        raise PipelineStateError(f"num_shards is {num_shards}; expected at least 1")
    return tuple(_shard(tree, sharding_spec, _Shards(num_shards, enforce_even_split), "tree"))


def unshard_tree(sharded_trees: Sequence[Any], sharding_spec: Any) -> Any:
    """Merges shards into the whole-batch value; the inverse of :func:`shard_tree`.

    Args:
        sharded_trees: One tree for each shard, in order.
        sharding_spec: Specifications with the structure of one shard, or a prefix of it.

    Returns:
        The whole value: concatenated or stacked tensors, joined lists, and of replicated values that of shard 0.

    Raises:
        PipelineStateError: There are no shards, their structures differ, or they cannot be joined.
    """
    if not sharded_trees:
        raise PipelineStateError("unshard_tree got no shards; expected at least one")
    return _unshard(list(sharded_trees), sharding_spec, "tree")


@dataclass(frozen=True, slots=True)
class _Shards:
    count: int
    even: bool

    def bounds(self, size: int, path: str) -> list[tuple[int, int]]:
        if self.even and size % self.count:
            raise PipelineStateError(
                f"{path} has a size of {size}, which does not split evenly into {self.count} shards; pass "
                f"enforce_even_split=False to allow shards that differ by one"
            )
        return shard_bounds(size, self.count)

    def require_one_each(self, size: int, path: str) -> None:
        if size != self.count:
            raise PipelineStateError(
                f"{path} has a size of {size}, but do_stack=True needs one element for each of {self.count} shards"
            )


def _shard(value: Any, spec: Any, shards: _Shards, path: str) -> list[Any]:
    if isinstance(spec, SpecReplicate):
        return [value] * shards.count
    opened = open_container(value)
    if isinstance(spec, SpecShard):
        if opened is None:
            return _shard_leaf(value, spec, shards, path)
        if is_sequence(value):
            return _shard_sequence(opened, spec, shards, path)
        specs: Sequence[Any] = [spec] * len(opened.children)
    else:
        opened, specs = _match(value, spec, path)
    parts = zip(opened.children, specs, opened.labels, strict=True)
    children = [_shard(child, inner, shards, path + label) for child, inner, label in parts]
    return [opened.rebuild([child[index] for child in children]) for index in range(shards.count)]


def _shard_leaf(value: Any, spec: SpecShard, shards: _Shards, path: str) -> list[Any]:
    if value is None:
        return [None] * shards.count
    if not isinstance(value, (torch.Tensor, np.ndarray)) or not -value.ndim <= spec.dim < value.ndim:
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, (torch.Tensor, np.ndarray)) else ""
        raise PipelineStateError(
            f"{path} is a {type(value).__name__}{shape}, which {spec} cannot cut; give SpecReplicate() or another dim"
        )
    dim = spec.dim % value.ndim
    before: tuple[Any, ...] = (slice(None),) * dim
    if spec.do_stack:
        shards.require_one_each(value.shape[dim], path)
        return [value[(*before, index)] for index in range(shards.count)]
    return [value[(*before, slice(start, stop))] for start, stop in shards.bounds(value.shape[dim], path)]


def _shard_sequence(opened: OpenContainer, spec: SpecShard, shards: _Shards, path: str) -> list[Any]:
    if spec.dim != 0:
        raise PipelineStateError(f"{path} is a list or tuple, which {spec} cannot cut; it has dim 0 only")
    items = opened.children
    if not spec.do_stack:
        return [opened.rebuild(items[start:stop]) for start, stop in shards.bounds(len(items), path)]
    shards.require_one_each(len(items), path)
    if any(isinstance(item, (torch.Tensor, np.ndarray)) or open_container(item) is not None for item in items):
        raise PipelineStateError(
            f"{path} is a list of tensors or containers, which would come back stacked; use SpecShard(0) without "
            f"do_stack to keep lists of one item"
        )
    return list(items)


def _match(value: Any, spec: Any, path: str) -> tuple[OpenContainer, list[Any]]:
    opened, wanted = open_container(value), open_container(spec)
    if wanted is None:
        raise PipelineStateError(
            f"The specification of {path} is {spec!r}; expected SpecShard(), SpecReplicate(), or a tree of them"
        )
    if opened is None or set(opened.keys) != set(wanted.keys):
        found = f"a {type(value).__name__}" if opened is None else f"keys {list(opened.keys)}"
        raise PipelineStateError(
            f"{path} is {found}, but its specification has keys {list(wanted.keys)}; the structures must be equal"
        )
    by_key = dict(zip(wanted.keys, wanted.children, strict=True))
    return opened, [by_key[key] for key in opened.keys]


def _unshard(values: list[Any], spec: Any, path: str) -> Any:
    if isinstance(spec, SpecReplicate):
        return values[0]
    first = values[0]
    if not isinstance(spec, SpecShard):
        matched = [_match(value, spec, path) for value in values]
        return _unshard_children([opened for opened, _ in matched], matched[0][1], path)
    if any(type(value) is not type(first) for value in values):
        kinds = sorted({type(value).__name__ for value in values})
        raise PipelineStateError(f"The shards of {path} are of different types: {', '.join(kinds)}; expected one type")
    if isinstance(first, (torch.Tensor, np.ndarray)):
        return _join_arrays(values, spec, path)
    opened = open_container(first)
    if opened is None:
        return _join_objects(values, spec, path)
    if is_sequence(first):
        return _join_sequences(values, spec)
    return _unshard_children(
        [_match(value, dict.fromkeys(opened.keys, spec), path)[0] for value in values], [spec] * len(opened.keys), path
    )


def _unshard_children(opened: list[OpenContainer], specs: list[Any], path: str) -> Any:
    first = opened[0]
    by_key = [dict(zip(one.keys, one.children, strict=True)) for one in opened]
    parts = zip(first.keys, first.labels, specs, strict=True)
    return first.rebuild([_unshard([one[key] for one in by_key], spec, path + label) for key, label, spec in parts])


def _join_arrays(values: list[Any], spec: SpecShard, path: str) -> Any:
    try:
        if isinstance(values[0], torch.Tensor):
            return torch.stack(values, spec.dim) if spec.do_stack else torch.cat(values, spec.dim)
        return np.stack(values, spec.dim) if spec.do_stack else np.concatenate(values, spec.dim)
    except (RuntimeError, IndexError, ValueError) as error:
        shapes = ", ".join(str(tuple(value.shape)) for value in values)
        raise PipelineStateError(f"The shards of {path}, of shapes {shapes}, cannot be joined by {spec}") from error


def _join_objects(values: list[Any], spec: SpecShard, path: str) -> Any:
    if values[0] is None:
        return None
    if spec.do_stack:
        return values
    raise PipelineStateError(
        f"The shards of {path} are of type {type(values[0]).__name__}, which {spec} cannot join; use "
        f"SpecShard(0, do_stack=True) for a list of them, or SpecReplicate() for one"
    )


def _join_sequences(values: list[Any], spec: SpecShard) -> Any:
    if spec.do_stack:
        return values
    opened = open_container(values[0])
    joined = [item for value in values for item in value]
    return joined if opened is None else opened.rebuild(joined)
