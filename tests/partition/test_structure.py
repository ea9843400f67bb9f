"""Taking results apart and putting them together again."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding
from transformers.cache_utils import DynamicCache
from transformers.modeling_outputs import BaseModelOutput

from d9d_lightning.partition.structure import (
    constant_key,
    constants_differ,
    copy_containers,
    flatten,
    tensors_in,
    unflatten,
)

Pair = namedtuple("Pair", ["left", "right"])


@dataclass
class Record:
    """A user's dataclass."""

    hidden: Tensor
    note: str = "note"
    extra: Tensor | None = None


@dataclass(frozen=True)
class Frozen:
    """A user's frozen dataclass."""

    hidden: Tensor
    count: int = 0


class Slotted:
    """An object without a ``__dict__``."""

    __slots__ = ("label", "value")

    def __init__(self, value: Tensor, label: str) -> None:
        self.value, self.label = value, label


def rebuilt(value: Any) -> tuple[Any, list[Tensor]]:
    """The same structure around other tensors, and these."""
    template, tensors = flatten(value)
    others = [tensor + 1 for tensor in tensors]
    return unflatten(template, others), others


def test_nested_containers_come_back_around_other_tensors() -> None:
    """Lists, tuples and dicts keep their types, keys, constants and None."""
    value = {"a": [torch.zeros(2), None, 3], "b": (torch.ones(1), {"c": "text"})}
    made, others = rebuilt(value)
    assert made["a"][0] is others[0] and made["b"][0] is others[1]
    assert made["a"][1:] == [None, 3] and made["b"][1] == {"c": "text"}
    assert isinstance(made["b"], tuple) and made["a"] is not value["a"]


def test_one_tensor_in_two_places_stays_one_tensor() -> None:
    """Identity inside a result is kept."""
    tensor = torch.zeros(2)
    made, others = rebuilt([tensor, {"again": tensor}])
    assert len(others) == 1 and made[0] is made[1]["again"]


def test_named_tuples_and_dataclasses_come_back() -> None:
    """Their types and plain fields survive, frozen ones too."""
    made, others = rebuilt(Pair(torch.zeros(1), Record(torch.ones(1))))
    assert isinstance(made, Pair) and isinstance(made.right, Record)
    assert made.right.hidden is others[1] and made.right.note == "note" and made.right.extra is None
    frozen, others = rebuilt(Frozen(torch.zeros(1), 7))
    assert isinstance(frozen, Frozen) and frozen.hidden is others[0] and frozen.count == 7


def test_objects_with_slots_come_back() -> None:
    """A plain object without a ``__dict__`` is entered as well."""
    made, others = rebuilt(Slotted(torch.zeros(1), "x"))
    assert isinstance(made, Slotted) and made.value is others[0] and made.label == "x"


def test_a_model_output_comes_back_by_key_attribute_and_position() -> None:
    """A transformers ModelOutput keeps its three ways of access, and its absent fields."""
    made, others = rebuilt(BaseModelOutput(last_hidden_state=torch.zeros(2), attentions=(torch.ones(1),)))
    assert isinstance(made, BaseModelOutput) and made.hidden_states is None
    assert made.last_hidden_state is others[0] and made["last_hidden_state"] is others[0] and made[0] is others[0]
    assert made.attentions[0] is others[1]


def test_a_cache_object_comes_back() -> None:
    """The tensors inside a cache are found, and a rebuilt cache holds the new ones without touching the old."""
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 2, 4), 0)
    made, others = rebuilt(cache)
    assert len(others) == 2 and made.layers[0].keys is others[0] and made.layers[0].values is others[1]
    assert made is not cache and cache.layers[0].keys is not others[0]


def test_a_template_keeps_no_tensor_alive() -> None:
    """What rebuilding needs is kept without the tensors: a plan may outlive the step by far."""
    for value in (
        Record(torch.zeros(1)),
        BaseModelOutput(last_hidden_state=torch.zeros(1), attentions=(torch.zeros(1),)),
        Slotted([torch.zeros(1)], "x"),  # type: ignore[arg-type]
        BatchEncoding({"input_ids": torch.zeros(1)}),
        [torch.zeros(1)],
    ):
        template, tensors = flatten(value)
        assert len(tensors) >= 1 and tensors_in(template.prototype) == []


def test_a_batch_encoding_comes_back() -> None:
    """A dict-like object that copies its own content is rebuilt with its keys."""
    made, others = rebuilt(BatchEncoding({"input_ids": torch.zeros(1)}))
    assert isinstance(made, BatchEncoding) and made["input_ids"] is others[0]


def test_cycles_end() -> None:
    """An object that holds itself is entered once."""
    record = Record(torch.zeros(1))
    record.extra = record  # type: ignore[assignment]
    assert len(flatten(record)[1]) == 1


@pytest.mark.parametrize(
    ("expected", "got", "says"),
    [
        ([1, torch.zeros(1)], [2, torch.zeros(1)], "2 instead of 1"),
        ((torch.zeros(1), None), (torch.zeros(1), torch.zeros(1)), "a tensor instead of None"),
        ({"a": torch.zeros(1)}, {"b": torch.zeros(1)}, r"\['b'\] instead of \['a'\]"),
        ([torch.zeros(1)], [torch.zeros(1)] * 2, "entries 2 instead of 1"),
        ([torch.zeros(1), 1], [torch.zeros(1), 1.0], "1.0 instead of 1"),
    ],
)
def test_differences_are_told(expected: Any, got: Any, says: str) -> None:
    """Where a result differs from the trace in form or in a constant, the difference is put into words."""
    import re

    difference = constants_differ(flatten(expected)[0], flatten(got)[0])
    assert difference is not None and re.search(says, difference), difference


def test_equal_forms_do_not_differ() -> None:
    """Other tensors and equal constants, not-a-number included, are no difference."""
    one, other = (flatten({"x": torch.rand(2), "n": float("nan"), "s": "a"})[0] for _ in range(2))
    assert constants_differ(one, other) is None


def test_copying_containers_copies_no_tensor() -> None:
    """A copied batch may be popped from, and holds the same tensors unless they are to be changed."""
    batch = {"x": torch.zeros(2), "rest": [torch.ones(1), OrderedDict(y=Pair(torch.ones(2), 1))]}
    copied = copy_containers(batch)
    assert copied["x"] is batch["x"] and copied["rest"][1]["y"].left is batch["rest"][1]["y"].left  # type: ignore[index]
    copied.pop("x")
    copied["rest"].clear()
    assert "x" in batch and len(batch["rest"]) == 2
    cloned = copy_containers(batch, torch.clone)
    assert cloned["x"] is not batch["x"] and isinstance(cloned["rest"][1], OrderedDict)


def test_the_key_of_a_template_knows_form_and_flags_only() -> None:
    """Flags and integers decide how a step runs; strings, floats and lists of names vary without changing it."""

    def key(value: Any) -> Any:
        return constant_key(flatten(value)[0])

    batch = {"x": torch.zeros(1), "flag": True, "name": "a", "names": ["a", "b"]}
    assert key(batch) == key({**batch, "name": "b", "names": ["c", "d"]})
    assert key(batch) != key({**batch, "flag": False})
    assert key(batch) != key({**batch, "x": None})
    hash(key(batch))
