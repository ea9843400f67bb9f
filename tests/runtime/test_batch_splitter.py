"""Promises of ``BatchSplitter``: all batches of a loader are read alike."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from d9d_lightning.runtime.batch import BatchSplitter


def rows(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


def images(*heights: int) -> list[torch.Tensor]:
    return [rows(3, height, 8) for height in heights]


def boxes(*counts: int) -> list[dict[str, torch.Tensor]]:
    return [{"boxes": rows(count, 4), "labels": torch.arange(count)} for count in counts]


def detection(size: int, boxes_each: int) -> Any:
    return images(*([8, 6, 8, 6][:size])), boxes(*([boxes_each] * size))


COINCIDENCES: dict[str, tuple[Any, Any, int]] = {
    "one image with as many boxes as channels": (detection(4, 2), detection(1, 3), 1),
    "as many crops as samples": (
        ([rows(8, 3, 8), rows(8, 3, 8), rows(8, 3, 4)], rows(8)),
        ([rows(3, 3, 8), rows(3, 3, 8), rows(3, 3, 4)], rows(3)),
        3,
    ),
    "as many images as channels": (
        (images(8, 6, 8, 6), rows(4)),
        (images(8, 6, 8), rows(3)),
        3,
    ),
    "as many masks as samples": (
        {"pixels": rows(4, 3, 8), "masks": [rows(2, 8)] * 4},
        {"pixels": rows(2, 3, 8), "masks": [rows(2, 8)] * 2},
        2,
    ),
}


@pytest.mark.parametrize("name", COINCIDENCES)
def test_sizes_that_happen_to_be_equal_do_not_change_the_reading(name: str) -> None:
    """A batch is read as the earlier ones of its loader, whichever of its sizes coincide."""
    usual, last, size = COINCIDENCES[name]
    splitter = BatchSplitter()
    splitter.split(usual, 2)
    split = splitter.split(last, 2)
    assert split.size == size
    assert splitter.find_size(last) == (size, None)
    lists = [key for key in fields(last) if isinstance(last[key], list)]
    assert lists
    for key in lists:
        if len(usual[key]) == splitter.find_size(usual)[0]:
            assert [item for part in split.microbatches for item in part[key]] == Same(last[key])
        else:
            assert [[len(item) for item in part[key]] for part in split.microbatches] == [
                [count] * len(last[key]) for count in split.sizes
            ]


def fields(batch: Any) -> list[Any]:
    return list(batch) if isinstance(batch, dict) else list(range(len(batch)))


class Same:
    """Equal to a list of the very same tensors, or of records of them."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __eq__(self, other: object) -> bool:
        return isinstance(other, list) and len(other) == len(self.items) and all(map(self._same, self.items, other))

    def _same(self, first: Any, second: Any) -> bool:
        if isinstance(first, dict):
            return all(first[key] is second[key] for key in first)
        return first is second


def test_another_kind_of_batch_is_read_anew() -> None:
    """What was learned from one structure does not stand in the way of another."""
    splitter = BatchSplitter()
    assert splitter.split([rows(8, 3), rows(8)], 2).size == 8
    assert splitter.split([{"a": rows(n, 4)} for n in (1, 2, 3)], 2).size == 3
    assert splitter.split({"x": rows(5, 2)}, 2).size == 5
