"""Promises of ``merge_outputs``."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from d9d_lightning.errors import PipelineConfigurationError
from d9d_lightning.runtime.batch import merge_outputs, split_batch

Prediction = namedtuple("Prediction", ["logits", "loss"])


@dataclass
class Detection:
    scores: torch.Tensor
    names: list[str]


def test_rows_are_joined_in_order() -> None:
    """Tensors with one row a sample become the tensor of the whole batch."""
    batch = torch.arange(10.0).reshape(5, 2)
    split = split_batch(batch, 2)
    assert torch.equal(merge_outputs(split.microbatches, split.sizes), batch)


@pytest.mark.parametrize("make", [torch.tensor, float])
def test_a_scalar_becomes_the_mean_over_samples(make: Any) -> None:
    """A loss is weighted by the sizes of its microbatches."""
    assert float(merge_outputs([make(1.0), make(4.0)], [2, 1])) == pytest.approx(2.0)


def test_lists_of_one_item_a_sample_are_joined() -> None:
    """Strings, dictionaries and tensors of their own shapes, one for each sample, become one list."""
    outputs = [["a", "b"], ["c"]]
    assert merge_outputs(outputs, [2, 1]) == ["a", "b", "c"]
    found = merge_outputs([({"n": 1}, {"n": 2}), ({"n": 3},)], [2, 1])
    assert found == ({"n": 1}, {"n": 2}, {"n": 3})


def test_containers_are_merged_child_by_child() -> None:
    """Dictionaries, tuples, named tuples, dataclasses and None keep their form."""
    one = {"p": Prediction(torch.ones(2, 3), torch.tensor(1.0)), "d": Detection(torch.ones(2), ["a", "b"]), "n": None}
    two = {"p": Prediction(torch.zeros(1, 3), torch.tensor(4.0)), "d": Detection(torch.zeros(1), ["c"]), "n": None}
    merged = merge_outputs([one, two], [2, 1])
    assert type(merged["p"]) is Prediction
    assert merged["p"].logits.shape == (3, 3)
    assert float(merged["p"].loss) == 2.0
    assert merged["d"].names == ["a", "b", "c"]
    assert merged["d"].scores.tolist() == [1.0, 1.0, 0.0]
    assert merged["n"] is None


@pytest.mark.parametrize("wrap", [list, tuple])
def test_two_tensors_of_a_microbatch_of_two_are_two_fields(wrap: type) -> None:
    """``(logits, labels)`` stays a pair where a microbatch has as many samples as the pair has fields."""
    pair = wrap([torch.ones(2, 3), torch.ones(2)])
    merged = merge_outputs([pair, pair], [2, 2])
    assert [tuple(field.shape) for field in merged] == [(4, 3), (4,)]


@pytest.mark.parametrize("size", [2, 3])
def test_a_tuple_of_fields_is_merged_field_by_field(size: int) -> None:
    """``return loss, accuracy`` and ``return logits, None`` stay pairs whatever the size of a microbatch."""
    merged = merge_outputs([(torch.tensor(1.0), 0.5), (torch.tensor(3.0), 1.5)], [size, size])
    assert (float(merged[0]), merged[1]) == (2.0, 1.0)
    logits, nothing = merge_outputs([(torch.ones(size, 2), None)] * 2, [size, size])
    assert logits.shape == (2 * size, 2)
    assert nothing is None


def test_equal_values_are_kept_and_others_are_listed() -> None:
    """What does not follow the samples is kept when all microbatches agree, and listed when they do not."""
    assert merge_outputs(["val", "val"], [2, 1]) == "val"
    assert merge_outputs([3, 4], [2, 1]) == [3, 4]
    assert merge_outputs([None, None], [2, 1]) is None
    assert merge_outputs([torch.tensor(3), torch.tensor(3)], [2, 1]).item() == 3
    assert len(merge_outputs([torch.tensor(3), torch.tensor(4)], [2, 1])) == 2
    assert len(merge_outputs([torch.eye(5), torch.eye(5) * 2], [2, 1])) == 2
    assert len(merge_outputs([None, torch.ones(1)], [2, 1])) == 2
    assert len(merge_outputs([{"a": 1}, {"b": 1}], [2, 1])) == 2


def test_a_matrix_of_a_microbatch_is_listed_when_it_has_a_dim_in_front() -> None:
    """``matrix[None]`` is not taken for rows of samples."""
    merged = merge_outputs([torch.eye(3)[None], torch.eye(3)[None] * 2], [3, 3])
    assert [tuple(part.shape) for part in merged] == [(1, 3, 3), (1, 3, 3)]


def test_rows_that_cannot_be_joined_are_listed() -> None:
    """Logits padded to another length in each microbatch stay apart."""
    merged = merge_outputs([torch.ones(2, 7), torch.ones(1, 5)], [2, 1])
    assert [tuple(part.shape) for part in merged] == [(2, 7), (1, 5)]


def test_arrays_are_joined_like_tensors() -> None:
    """Numpy arrays with one row a sample are concatenated."""
    assert merge_outputs([np.ones((2, 3)), np.zeros((1, 3))], [2, 1]).shape == (3, 3)


def test_one_microbatch_is_returned_as_it_is() -> None:
    """The output of a batch that was not cut is not touched."""
    output = {"anything": object()}
    assert merge_outputs([output], [1]) is output


@pytest.mark.parametrize(("outputs", "sizes"), [([], []), ([1], [1, 2])])
def test_outputs_and_sizes_must_match(outputs: list[int], sizes: list[int]) -> None:
    """A missing output is an error that gives both counts."""
    with pytest.raises(PipelineConfigurationError, match=rf"got {len(outputs)} outputs for {len(sizes)}"):
        merge_outputs(outputs, sizes)
