"""Promises of ``batch_spec``: what the caller says of a field goes before what is read from the batch."""

from __future__ import annotations

import math
from collections import namedtuple
from typing import Any

import pytest
import torch

from d9d_lightning.errors import PipelineConfigurationError
from d9d_lightning.runtime.batch import split_batch
from d9d_lightning.runtime.sharding import SpecReplicate, SpecShard

Pair = namedtuple("Pair", ["image", "label"])


class Graph:
    """An object that holds a tensor and cannot be cut."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


def rows(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


def images(*heights: int) -> list[torch.Tensor]:
    return [rows(3, height, 8) for height in heights]


def test_a_replicated_field_leaves_the_others_unambiguous() -> None:
    """SpecReplicate takes a field out of the search for the batch size."""
    batch = {"ids": rows(4, 16), "mask": rows(16, 16), "y": rows(4)}
    split = split_batch(batch, 2, {"mask": SpecReplicate()})
    assert split.size == 4
    assert split.microbatches[0]["mask"] is batch["mask"]


def test_a_sharded_field_decides_the_batch_size() -> None:
    """SpecShard says what the batch size is; fields that do not have it are replicated."""
    split = split_batch({"ids": rows(4, 16), "mask": rows(16, 16), "y": rows(4)}, 2, {"ids": SpecShard(0)})
    assert split.size == 4
    assert [tuple(part["mask"].shape) for part in split.microbatches] == [(16, 16)] * 2
    assert [len(part["y"]) for part in split.microbatches] == [2, 2]


def test_another_dim_can_be_cut() -> None:
    """A sequence-first tensor is cut along the dim it is told."""
    split = split_batch({"x": rows(7, 4, 2), "y": rows(4)}, 3, {"x": SpecShard(1)})
    assert [tuple(part["x"].shape) for part in split.microbatches] == [(7, 2, 2), (7, 1, 2), (7, 1, 2)]
    assert split_batch({"x": rows(7, 4)}, 2, {"x": SpecShard(-1)}).size == 4


def test_several_rows_a_sample_are_cut_together() -> None:
    """A field with k rows for each sample is cut at k times the bounds of the samples."""
    batch = {"query": rows(4, 2), "documents": rows(8, 2)}
    split = split_batch(batch, 3, {"query": SpecShard(0), "documents": SpecShard(0)})
    assert split.size == 4
    assert [len(part["documents"]) for part in split.microbatches] == [4, 2, 2]


def test_one_specification_stands_for_everything_below() -> None:
    """A leaf of the specification covers a whole container; a list under it is cut along its length."""
    batch = {"images": images(8, 6, 8, 6), "extra": {"a": rows(4), "b": None}}
    split = split_batch(batch, 2, {"images": SpecShard(), "extra": SpecShard()})
    assert split.size == 4
    assert [len(part["images"]) for part in split.microbatches] == [2, 2]
    assert split.microbatches[0]["extra"]["b"] is None
    assert split_batch({"x": rows(4, 2), "y": rows(4)}, 2, SpecShard(0)).size == 4
    assert split_batch(images(8, 6, 8, 6), 2, SpecShard()).size == 4


def test_specifications_by_position_and_by_field_name() -> None:
    """Tuples take specifications by position, named tuples and dataclasses by name."""
    assert split_batch((rows(4, 2), rows(9)), 2, (None, SpecReplicate())).size == 4
    assert split_batch(Pair(rows(4, 2), rows(9)), 2, {"label": SpecReplicate()}).size == 4
    views = split_batch({"views": [rows(4, 3, 8), rows(4, 3, 6)]}, 2, {"views": [SpecShard(0), SpecShard(0)]})
    assert views.microbatches[0]["views"][1].shape == (2, 3, 6)


def test_strings_alone_can_be_cut_on_request() -> None:
    """With a specification, a batch without tensors is cut as told."""
    assert split_batch({"text": ["a", "b", "c"]}, 2, {"text": SpecShard()}).microbatches[0] == {"text": ["a", "b"]}


def test_a_sealed_part_can_be_replicated_on_request() -> None:
    """SpecReplicate lets the rest of a batch be cut beside an object that cannot."""
    split = split_batch({"x": rows(4, 2), "graph": Graph(rows(9, 2))}, 2, {"graph": SpecReplicate()})
    assert split.size == 4


BAD_SPECS: dict[str, tuple[Any, Any, str]] = {
    "unknown field": ({"x": rows(4)}, {"z": SpecReplicate()}, "'z'.*'x'"),
    "wrong length": ((rows(4), rows(4)), (SpecShard(),), "1 specifications by position"),
    "not a specification": ({"x": rows(4)}, {"x": "shard"}, "'shard'"),
    "no such dim": ({"x": rows(4)}, {"x": SpecShard(1)}, r"shape \(4,\)"),
    "no dim at all": ({"x": torch.tensor(1.0)}, {"x": SpecShard()}, "cannot be cut"),
    "stacking": ({"x": rows(4)}, {"x": SpecShard(0, do_stack=True)}, "keeps the batch dim"),
    "no multiple": ({"a": rows(4), "b": rows(6)}, SpecShard(), "no multiple of 4"),
    "fields as samples": ((rows(4, 2), rows(4)), SpecShard(), "one specification for each item"),
    "list along dim 1": ({"a": ["x", "y"]}, {"a": SpecShard(1)}, "cannot be cut"),
}


@pytest.mark.parametrize("name", BAD_SPECS)
def test_a_specification_that_does_not_fit_is_refused(name: str) -> None:
    """A specification that does not fit the batch is an error that names the field and what was found there."""
    batch, spec, message = BAD_SPECS[name]
    with pytest.raises(PipelineConfigurationError, match=message):
        split_batch(batch, 2, spec)
