"""Promises of ``shard_tree`` and ``unshard_tree``."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from d9d_lightning.errors import PipelineStateError
from d9d_lightning.runtime.sharding import SpecReplicate, SpecShard, shard_tree, unshard_tree

Pair = namedtuple("Pair", ["x", "y"])


@dataclass
class Fields:
    x: torch.Tensor
    words: list[str]


def rows(*shape: int) -> torch.Tensor:
    return torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, np.ndarray):
        return np.array_equal(first, second)
    if isinstance(first, dict):
        return set(first) == set(second) and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, Fields):
        return type(second) is Fields and equal(vars(first), vars(second))
    if isinstance(first, (list, tuple)):
        return type(first) is type(second) and len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second)


ROUND_TRIPS: dict[str, tuple[Any, Any, int]] = {
    "1-d": (rows(8), SpecShard(0), 4),
    "2-d along dim 0": (rows(8, 3), SpecShard(0), 4),
    "2-d along dim 1": (rows(3, 8), SpecShard(1), 4),
    "2-d along the last dim": (rows(3, 8), SpecShard(-1), 2),
    "integers": (torch.arange(8), SpecShard(0), 2),
    "stacked along dim 0": (rows(4, 3), SpecShard(0, do_stack=True), 4),
    "stacked along dim 1": (rows(3, 4), SpecShard(1, do_stack=True), 4),
    "stacked to 0-d": (rows(4), SpecShard(0, do_stack=True), 4),
    "list": (list("abcd"), SpecShard(0), 2),
    "tuple": (tuple("abcd"), SpecShard(0), 2),
    "list of one object a shard": ([1, 2, 3, 4], SpecShard(0, do_stack=True), 4),
    "list of tensors": ([rows(2), rows(3), rows(1)], SpecShard(0), 3),
    "array": (np.arange(8), SpecShard(0), 4),
    "stacked array": (np.arange(8).reshape(2, 4), SpecShard(1, do_stack=True), 4),
    "replicated": (rows(5), SpecReplicate(), 4),
    "none": (None, SpecShard(0), 2),
    "uneven": (rows(10, 2), SpecShard(0), 4),
    "uneven list": (list("abcde"), SpecShard(0), 2),
    "fewer rows than shards": (rows(2, 3), SpecShard(0), 4),
    "dictionary": ({"x": rows(4), "n": 3}, {"x": SpecShard(0), "n": SpecReplicate()}, 2),
    "one leaf for a dictionary": ({"x": rows(4), "inner": {"y": rows(4, 2)}}, SpecShard(0), 2),
    "named tuple": (Pair(rows(4), rows(2)), {"x": SpecShard(0), "y": SpecReplicate()}, 2),
    "dataclass": (Fields(rows(4), list("abcd")), SpecShard(0), 2),
    "fields by position": ([rows(4), rows(2, 4)], [SpecShard(0), SpecShard(1)], 2),
    "deep": ({"a": [({"b": rows(4)}, None)]}, {"a": [({"b": SpecShard(0)}, SpecReplicate())]}, 2),
}


@pytest.mark.parametrize("name", ROUND_TRIPS)
def test_merging_undoes_cutting(name: str) -> None:
    """What was cut by a specification comes back equal, in value, dtype and type."""
    value, spec, count = ROUND_TRIPS[name]
    shards = shard_tree(value, spec, count)
    assert len(shards) == count
    assert equal(value, unshard_tree(shards, spec))


def test_uneven_sizes_follow_tensor_split() -> None:
    """Shards have the sizes of torch.tensor_split, lists as well as tensors."""
    expected = [len(part) for part in rows(10).tensor_split(4)]
    assert [len(part) for part in shard_tree(rows(10), SpecShard(0), 4)] == expected
    assert [len(part) for part in shard_tree(list(range(10)), SpecShard(0), 4)] == expected


@pytest.mark.parametrize("value", [rows(10), list(range(10))], ids=["tensor", "list"])
def test_an_uneven_split_is_refused_on_request(value: Any) -> None:
    """With enforce_even_split a size that is no multiple is a ValueError that names both numbers."""
    with pytest.raises(ValueError, match=r"size of 10.*4 shards"):
        shard_tree(value, SpecShard(0), 4, enforce_even_split=True)
    assert len(shard_tree(value, SpecShard(0), 5, enforce_even_split=True)) == 5


def test_a_replicated_value_is_the_same_object() -> None:
    """SpecReplicate hands out a reference, and merging takes that of shard 0."""
    value = {"k": rows(3)}
    shards = shard_tree(value, SpecReplicate(), 3)
    assert all(shard is value for shard in shards)
    assert unshard_tree(shards, SpecReplicate()) is value


def test_shards_are_views() -> None:
    """Cutting a tensor copies nothing."""
    value = rows(4, 2)
    assert shard_tree(value, SpecShard(0), 2)[1].data_ptr() == value[2:].data_ptr()


def test_stacking_removes_the_dim() -> None:
    """A stacked dim is gone in each shard."""
    assert [tuple(part.shape) for part in shard_tree(rows(3, 2, 5), SpecShard(1, do_stack=True), 2)] == [(3, 5)] * 2


BAD_SHARDS: dict[str, tuple[Any, Any, str]] = {
    "other keys": ({"x": rows(4)}, {"y": SpecShard(0)}, r"keys \['x'\].*keys \['y'\]"),
    "missing key": ({"x": rows(4), "y": rows(4)}, {"x": SpecShard(0)}, "structures must be equal"),
    "container for a leaf": (rows(4), {"x": SpecShard(0)}, "tree is a Tensor"),
    "other length": ([rows(4), rows(4)], [SpecShard(0)], "structures must be equal"),
    "no specification": ({"x": rows(4)}, {"x": 3}, r"tree\['x'\] is 3"),
    "number": ({"n": 3}, {"n": SpecShard(0)}, r"tree\['n'\] is a int"),
    "0-d tensor": (torch.tensor(1.0), SpecShard(0), r"shape \(\)"),
    "missing dim": (rows(4), SpecShard(1), r"shape \(4,\)"),
    "list along dim 1": ([1, 2], SpecShard(1), "dim 0 only"),
    "too many to stack": (rows(4), SpecShard(0, do_stack=True), "size of 4.*2 shards"),
    "too many objects to stack": ([1, 2, 3], SpecShard(0, do_stack=True), "size of 3.*2 shards"),
    "list of tensors to stack": ([rows(1), rows(1)], SpecShard(0, do_stack=True), "come back stacked"),
}


@pytest.mark.parametrize("name", BAD_SHARDS)
def test_a_value_against_its_specification_is_a_value_error(name: str) -> None:
    """A value that its specification cannot cut is a ValueError that says where and why."""
    value, spec, message = BAD_SHARDS[name]
    with pytest.raises(PipelineStateError, match=message) as info:
        shard_tree(value, spec, 2)
    assert isinstance(info.value, ValueError)


BAD_MERGES: dict[str, tuple[list[Any], Any, str]] = {
    "nothing": ([], SpecShard(0), "no shards"),
    "types": ([rows(2), [1]], SpecShard(0), "different types: Tensor, list"),
    "shapes": ([rows(2, 3), rows(2, 4)], SpecShard(0), r"\(2, 3\), \(2, 4\)"),
    "0-d": ([torch.tensor(1.0)] * 2, SpecShard(0), "cannot be joined"),
    "numbers": ([1, 2], SpecShard(0), "do_stack=True"),
    "keys": ([{"x": rows(1)}, {"y": rows(1)}], SpecShard(0), "structures must be equal"),
}


@pytest.mark.parametrize("name", BAD_MERGES)
def test_shards_that_do_not_fit_together_are_a_value_error(name: str) -> None:
    """Shards that cannot be joined are a ValueError that shows how they differ."""
    shards, spec, message = BAD_MERGES[name]
    with pytest.raises(PipelineStateError, match=message):
        unshard_tree(shards, spec)


def test_the_number_of_shards_must_be_positive() -> None:
    """Zero shards are refused."""
    with pytest.raises(PipelineStateError, match="num_shards is 0"):
        shard_tree(rows(4), SpecShard(0), 0)
