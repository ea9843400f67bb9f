"""Batches made at random, well-formed and not: a batch is cut exactly, kept whole with a reason, or refused by name."""

from __future__ import annotations

import random
from collections import OrderedDict, UserDict, deque, namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from d9d_lightning.errors import PipelineConfigurationError
from d9d_lightning.runtime.batch import BatchSplit, split_batch
from d9d_lightning.runtime.containers import copy_containers, open_container
from d9d_lightning.runtime.outputs import merge_outputs

Point = namedtuple("Point", ["x", "y"])


@dataclass
class Record:
    a: Any
    b: Any = None


class Opaque:
    """An object of the user's own."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Stubborn(Mapping[str, Any]):
    """A mapping that cannot be built anew."""

    def __init__(self, first: Any, second: Any) -> None:
        self._items = {"first": first, "second": second}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return 2


def containers_in(value: Any) -> Iterator[Any]:
    opened = open_container(value)
    if opened is not None:
        # Immutable ones may be shared; what they hold may not.
        if not isinstance(value, (tuple, MappingProxyType)):
            yield value
        for child in opened.children:
            yield from containers_in(child)


def leaves_in(value: Any) -> Iterator[Any]:
    opened = open_container(value)
    if opened is None:
        yield value
    else:
        for child in opened.children:
            yield from leaves_in(child)


def picture(value: Any) -> Any:
    """A comparable account of a batch: types, keys, and every leaf by identity or content."""
    opened = open_container(value)
    if opened is not None:
        return type(value), opened.keys, tuple(picture(child) for child in opened.children)
    return (id(value), tuple(value.flatten().tolist())) if isinstance(value, torch.Tensor) else id(value)


def check_private(batch: Any, split: BatchSplit) -> None:
    owned = [{id(container) for container in containers_in(part)} for part in (batch, *split.microbatches)]
    assert sum(map(len, owned)) == len(set().union(*owned)), "a container is shared"


# ---- batches with a known number of samples


def make_field(draw: random.Random, size: int) -> Any:
    """A field that cannot be mistaken: rows, samples in a list, or something that no microbatch splits."""
    kinds = [
        lambda: torch.rand(size, draw.choice([2, 5, 7])),
        lambda: torch.randint(9, (size,)),
        lambda: torch.rand(size, 1, 3) > 0.5,
        lambda: [f"sample {index}" for index in range(size)],
        lambda: np.arange(size * 2).reshape(size, 2),
        lambda: np.array([str(index) for index in range(size)], dtype=object),
        lambda: [{"boxes": torch.rand(index + size + 1, 4)} for index in range(size)],
        lambda: [torch.rand(size + 1 + index, 2) for index in range(size)],
        lambda: None,
        lambda: draw.choice(["name", 3, 0.5, True, b"raw"]),
        lambda: torch.tensor(0.5),
    ]
    return draw.choice(kinds)()


def make_known(draw: random.Random, size: int, depth: int = 0) -> Any:
    children = [make_field(draw, size) for _ in range(draw.randint(1, 4))]
    if depth < 2 and draw.random() < 0.6:
        children.append(make_known(draw, size, depth + 1))
    named = {f"f{index}": child for index, child in enumerate(children)}
    kind = draw.randrange(8)
    if kind == 0:
        return Point(children[0], children[-1])
    if kind == 1:
        return Record(children[0], children[-1])
    if kind == 2:
        return SimpleNamespace(**named)
    if kind == 3:
        return UserDict(named)
    if kind == 4:
        return OrderedDict(named)
    if kind == 5:
        return (torch.rand(size, 2), *children, "end")
    return named


@pytest.mark.parametrize("seed", range(8))
def test_a_batch_of_known_size_is_cut_exactly(seed: int) -> None:
    """Whatever it is made of, the microbatches joined again are the batch, and the batch is as it was."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    for _ in range(40):
        size, count = draw.randint(5, 9), draw.randint(1, 6)
        batch = {"anchor": torch.rand(size, 3), "labels": torch.rand(size), "rest": make_known(draw, size)}
        before = picture(batch)
        split = split_batch(batch, count)
        assert split.size == size
        assert sum(split.sizes) == size
        assert len(split.microbatches) == min(size, count)
        assert picture(batch) == before
        check_private(batch, split)
        assert_joined(batch, merge_outputs(split.microbatches, split.sizes), size)


def assert_joined(batch: Any, joined: Any, size: int) -> None:
    """Leaf by leaf equality; only what every microbatch got whole may come back once or as a mean of itself."""
    ours, theirs = list(leaves_in(batch)), list(leaves_in(joined))
    assert type(joined) is type(batch)
    assert len(ours) == len(theirs)
    for first, second in zip(ours, theirs, strict=True):
        if isinstance(first, torch.Tensor):
            assert first.shape == second.shape
            assert torch.allclose(first.float(), second.float())
        elif isinstance(first, np.ndarray):
            assert np.array_equal(first, second)
        else:
            assert first == second or first == pytest.approx(second)


# ---- anything at all


def make_junk(draw: random.Random, depth: int = 0) -> Any:
    def deeper() -> Any:
        return make_junk(draw, depth + 1)

    some = draw.randint(0, 4)
    kinds = [
        lambda: torch.rand([draw.randint(0, 4) for _ in range(draw.randint(0, 3))]),
        lambda: torch.arange(draw.randint(0, 5)),
        lambda: torch.eye(draw.randint(1, 4)).to_sparse(),
        lambda: torch.nested.nested_tensor([torch.rand(2), torch.rand(3)], layout=torch.jagged),
        lambda: torch.rand(3, 2, device="meta"),
        lambda: torch.rand(1, 2).expand(4, 2),
        lambda: pack_sequence([torch.rand(3, 2), torch.rand(1, 2)]),
        lambda: torch.nn.Parameter(torch.rand(3, 2)),
        lambda: torch.max(torch.rand(3, 2), dim=1),
        lambda: torch.Size([2, 3]),
        lambda: np.zeros(draw.randint(0, 4)),
        lambda: np.array("text"),
        lambda: np.float32(1),
        lambda: draw.choice([None, "", "word", b"", 0, -1, 2.5, float("nan"), True, 1j, Ellipsis, int, len]),
        lambda: iter([torch.rand(2)]),
        lambda: {torch.rand(2)},
        lambda: frozenset({1, 2}),
        lambda: deque([torch.rand(2), torch.rand(3)]),
        lambda: range(3),
        lambda: Opaque(deeper() if depth < 3 else 1),
        lambda: torch.nn.Linear(2, 2),
    ]
    nested = [
        lambda: [deeper() for _ in range(some)],
        lambda: tuple(deeper() for _ in range(some)),
        lambda: {draw.choice(["k", 1, None, ("a", 2), 2.5]): deeper() for _ in range(some)},
        lambda: MappingProxyType({"k": deeper()}),
        lambda: Stubborn(deeper(), deeper()),
        lambda: Record(deeper(), deeper()),
        lambda: Point(deeper(), deeper()),
        lambda: [{"x": torch.rand(draw.randint(0, 3), 2)} for _ in range(some)],
    ]
    return draw.choice(kinds + (nested * 3 if depth < 3 else []))()


@pytest.mark.parametrize("seed", range(10))
def test_anything_is_cut_kept_whole_or_refused_by_name(seed: int) -> None:
    """No value makes anything but a split that adds up, or the one error of this package that says what to do."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    outcomes = set()
    for _ in range(150):
        batch, count = make_junk(draw), draw.randint(1, 5)
        before = picture(batch) if not has_meta(batch) else None
        try:
            split = split_batch(batch, count)
        except PipelineConfigurationError as error:
            assert "batch_spec" in str(error)
            outcomes.add("refused")
            continue
        outcomes.add("cut" if len(split.microbatches) > 1 else "whole")
        assert len(split.microbatches) == len(split.sizes) <= count
        assert all(type(part) is type(batch) or isinstance(batch, torch.nn.Parameter) for part in split.microbatches)
        assert split.size is None or sum(split.sizes) == split.size
        assert (split.reason is None) == (len(split.microbatches) == count and split.size != 0)
        assert before is None or picture(batch) == before
        check_private(batch, split)
    assert outcomes == {"cut", "whole", "refused"}


def has_meta(value: Any) -> bool:
    return any(
        isinstance(leaf, torch.Tensor) and (leaf.is_meta or leaf.is_nested or leaf.is_sparse)
        for leaf in leaves_in(value)
    )


def test_a_batch_that_contains_itself_is_refused_like_in_lightning() -> None:
    """A container inside itself ends in Python's own RecursionError, not in a hang."""
    batch: list[Any] = [torch.rand(2)]
    batch.append(batch)
    with pytest.raises(RecursionError):
        split_batch(batch, 2)


def test_a_long_list_of_strings_is_not_looked_at_item_by_item() -> None:
    """Metadata of any length costs a copy of the list, not a node for each item."""
    names = [str(index) for index in range(10_000)]
    parts = split_batch({"x": torch.rand(10_000, 1), "names": names}, 2).microbatches
    assert parts[1]["names"] == names[5000:]
    assert copy_containers(names) is not names


def test_fields_of_a_dataclass_that_were_never_set_are_left_alone() -> None:
    """A dataclass whose field was deleted is cut along the others."""
    record = Record(torch.rand(4, 2), "b")
    del record.b
    assert is_dataclass(record)
    assert len(fields(record)) == 2
    assert split_batch(record, 2).microbatches[0].a.shape == (2, 2)
