"""Promises of ``PipelineState`` and ``PipelineStateHandler``."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch

from d9d_lightning.errors import PipelineStateError
from d9d_lightning.runtime.sharding import SpecReplicate, SpecShard, shard_tree
from d9d_lightning.runtime.state import PipelineState, PipelineStateHandler


def rows(*shape: int) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)


def equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and torch.equal(first, second)
    if isinstance(first, dict):
        return set(first) == set(second) and all(equal(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return type(first) is type(second) and len(first) == len(second) and all(map(equal, first, second))
    return bool(first == second)


# name: (whole value, specification given by the caller or None to have it guessed)
CASES: dict[str, tuple[Any, Any]] = {
    "1-d": (rows(4), SpecShard(0)),
    "2-d along dim 0": (rows(4, 3), SpecShard(0)),
    "2-d along dim 1": (rows(3, 4), SpecShard(1)),
    "list": (list("abcd"), SpecShard(0)),
    "stacked tensor": (rows(2, 3), SpecShard(0, do_stack=True)),
    "stacked along dim 1": (rows(3, 2), SpecShard(1, do_stack=True)),
    "stacked list": ([1, 2], SpecShard(0, do_stack=True)),
    "tree": ({"x": rows(4), "name": "n"}, {"x": SpecShard(0), "name": SpecReplicate()}),
    "guessed 1-d": (rows(4), None),
    "guessed 2-d": (rows(4, 3), None),
    "guessed list": (list("abcd"), None),
    "guessed uneven": (rows(5, 2), None),
    "guessed dictionary": ({"x": rows(4), "deep": {"y": rows(4, 2)}, "words": list("abcd")}, None),
    "guessed tuple": ((rows(4), rows(4, 2)), None),
}
WAYS = ["global-global", "shard-shard", "global-shard", "shard-global"]


def make(name: str) -> tuple[PipelineStateHandler, Any, list[Any]]:
    value, spec = CASES[name]
    handler = PipelineStateHandler({} if spec is None else {"k": spec}, num_shards=2)
    guessed = (SpecShard(0), SpecShard(0)) if isinstance(value, tuple) else SpecShard(0)
    return handler, value, list(shard_tree(value, spec or guessed, 2))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_a_value_comes_back_in_either_form(name: str, way: str) -> None:
    """A value written whole or by microbatch is read equal in both forms."""
    handler, whole, shards = make(name)
    written, read = way.split("-")
    if written == "global":
        handler.global_state()["k"] = whole
    else:
        for index, shard in enumerate(shards):
            handler.sharded_state(index)["k"] = shard
    if read == "global":
        assert equal(whole, handler.global_state()["k"])
    else:
        assert all(equal(shard, handler.sharded_state(index)["k"]) for index, shard in enumerate(shards))


# ---- what is guessed


def test_microbatch_scalars_and_objects_are_stacked() -> None:
    """A 0-d tensor a microbatch becomes a vector, an object a microbatch a list."""
    handler = PipelineStateHandler({}, 2)
    for index in range(2):
        handler.sharded_state(index)["loss"] = torch.tensor(float(index))
        handler.sharded_state(index)["name"] = f"m{index}"
    assert handler.global_state()["loss"].tolist() == [0.0, 1.0]
    assert handler.global_state()["name"] == ["m0", "m1"]


def test_microbatch_tensors_and_lists_are_joined_along_dim_0() -> None:
    """Tensors with dims and lists are concatenated, also of different sizes."""
    handler = PipelineStateHandler({}, 2)
    for index in range(2):
        handler.sharded_state(index)["x"] = torch.full((index + 1, 2), float(index))
        handler.sharded_state(index)["words"] = ["w"] * (index + 1)
    assert handler.global_state()["x"].shape == (3, 2)
    assert handler.global_state()["words"] == ["w"] * 3


@pytest.mark.parametrize("value", [torch.tensor(2.0), "name", 3, None])
def test_whole_scalars_and_objects_are_replicated(value: Any) -> None:
    """A whole value without rows reaches every microbatch."""
    handler = PipelineStateHandler({}, 3)
    handler.global_state()["k"] = value
    assert all(handler.sharded_state(index)["k"] == value for index in range(3))


def test_the_callers_specification_comes_first() -> None:
    """A specification that was given is not replaced by a guess."""
    handler = PipelineStateHandler({"table": SpecReplicate()}, 2)
    handler.global_state()["table"] = rows(4)
    assert handler.sharded_state(1)["table"].shape == (4,)


def test_the_first_write_decides_the_guess() -> None:
    """A guess stays for the key until reset."""
    handler = PipelineStateHandler({}, 2)
    handler.global_state()["k"] = torch.tensor(1.0)
    handler.global_state()["k"] = rows(4)
    assert handler.sharded_state(0)["k"].shape == (4,)


# ---- what is stored


@pytest.mark.parametrize("whole", [True, False])
def test_both_writes_detach(whole: bool) -> None:
    """No stored tensor, also inside a tree, holds on to its graph."""
    handler = PipelineStateHandler({}, 1)
    weight = torch.ones(2, requires_grad=True)
    view = handler.global_state() if whole else handler.sharded_state(0)
    produced = weight * 2
    leaf = weakref.ref(weight)
    view["k"] = {"a": produced, "b": [produced]}
    del produced, weight
    assert leaf() is None
    assert not view["k"]["a"].requires_grad
    assert not view["k"]["b"][0].requires_grad


def test_a_stored_container_is_the_stores_own() -> None:
    """Changing a container after it was stored does not change the store."""
    handler = PipelineStateHandler({}, 2)
    value = {"x": rows(4)}
    handler.global_state()["k"] = value
    value.clear()
    assert set(handler.global_state()["k"]) == {"x"}


def test_keys_and_microbatches_do_not_touch_each_other() -> None:
    """Writing one shard of one key leaves the other shards and keys alone."""
    handler = PipelineStateHandler({}, 2)
    for index in range(2):
        handler.sharded_state(index)["a"] = rows(2) + index
    handler.global_state()["b"] = "kept"
    handler.sharded_state(0)["a"] = rows(2) + 9
    assert handler.sharded_state(1)["a"].tolist() == [1.0, 2.0]
    assert handler.global_state()["b"] == "kept"


# ---- forms


def test_reads_never_change_the_form_of_a_key() -> None:
    """A shard write after a global one is refused, whether or not somebody read a shard in between."""
    handler = PipelineStateHandler({}, 2)
    handler.global_state()["k"] = rows(4)
    with pytest.raises(PipelineStateError, match="written for the whole batch"):
        handler.sharded_state(0)["k"] = rows(2)
    assert handler.sharded_state(0)["k"].shape == (2,)
    with pytest.raises(ValueError, match="written for the whole batch"):
        handler.sharded_state(0)["k"] = rows(2)


def test_a_shard_can_be_replaced_after_a_global_read() -> None:
    """A key written by microbatch stays so when it is read as a whole."""
    handler = PipelineStateHandler({}, 2)
    for index in range(2):
        handler.sharded_state(index)["k"] = rows(2)
    assert handler.global_state()["k"].shape == (4,)
    handler.sharded_state(1)["k"] = rows(2) + 5
    assert handler.global_state()["k"].tolist() == [0.0, 1.0, 5.0, 6.0]


def test_a_global_write_replaces_shards() -> None:
    """Writing a key as a whole drops what its microbatches had."""
    handler = PipelineStateHandler({}, 2)
    handler.sharded_state(0)["k"] = rows(2)
    handler.global_state()["k"] = rows(6)
    assert handler.sharded_state(0)["k"].tolist() == [0.0, 1.0, 2.0]


def test_a_shard_view_contains_only_its_own_shard() -> None:
    """``in`` says whether this view can read the key."""
    handler = PipelineStateHandler({}, 2)
    handler.sharded_state(0)["k"] = rows(2)
    assert "k" in handler.sharded_state(0)
    assert "k" not in handler.sharded_state(1)
    assert "k" not in handler.global_state()
    handler.sharded_state(1)["k"] = rows(2)
    assert "k" in handler.global_state()
    handler.global_state()["whole"] = 1
    assert "whole" in handler.sharded_state(1)
    assert "missing" not in handler.global_state()
    assert isinstance(handler.global_state(), PipelineState)


# ---- errors


@pytest.mark.parametrize("kind", [ValueError, KeyError])
def test_a_missing_key_is_a_value_error(kind: type[Exception]) -> None:
    """Reading a key that was never written names it and what there is; it can be caught as either built-in error."""
    handler = PipelineStateHandler({}, 2)
    handler.global_state()["other"] = 1
    with pytest.raises(kind, match="'k' was never written; stored so far: 'other'"):
        handler.global_state()["k"]
    with pytest.raises(kind, match="'k' was never written"):
        handler.sharded_state(0)["k"]


def test_a_missing_shard_is_a_key_error() -> None:
    """Reading a shard, or a whole, of which shards are missing is a KeyError that lists them."""
    handler = PipelineStateHandler({}, 3)
    handler.sharded_state(1)["k"] = rows(2)
    with pytest.raises(KeyError, match=r"no shard 0, only \[1\]"):
        handler.sharded_state(0)["k"]
    with pytest.raises(KeyError, match=r"lacks shards \[0, 2\] of 3"):
        handler.global_state()["k"]


@pytest.mark.parametrize("shard", [-1, 2, 7])
def test_an_unknown_shard_is_an_error(shard: int) -> None:
    """A microbatch that does not exist is refused at once, by views and by methods."""
    handler = PipelineStateHandler({}, 2)
    with pytest.raises(PipelineStateError, match=f"shard {shard} does not exist"):
        handler.sharded_state(shard)
    with pytest.raises(PipelineStateError, match=f"shard {shard} does not exist"):
        handler.store_shard("k", 1, shard)
    handler.global_state()["k"] = rows(4)
    with pytest.raises(PipelineStateError, match=f"shard {shard} does not exist"):
        handler.acquire_shard("k", shard)


def test_an_uneven_split_is_refused_on_request() -> None:
    """With enforce_even_split the seed's ValueError is back."""
    handler = PipelineStateHandler({}, 2, enforce_even_split=True)
    handler.global_state()["k"] = rows(5)
    with pytest.raises(ValueError, match=r"size of 5.*2 shards"):
        handler.sharded_state(0)["k"]


def test_the_number_of_shards_must_be_positive() -> None:
    """A store for no microbatches is refused."""
    with pytest.raises(PipelineStateError, match="num_shards is 0"):
        PipelineStateHandler({}, 0)


# ---- reset


def test_reset_forgets_guesses_and_keeps_the_callers_specifications() -> None:
    """A key that was a scalar in one step may be a vector in the next; a given specification still holds."""
    handler = PipelineStateHandler({"given": SpecShard(1)}, 2)
    for index in range(2):
        handler.sharded_state(index)["k"] = torch.tensor(1.0)
    assert handler.global_state()["k"].shape == (2,)
    handler.reset()
    assert "k" not in handler.global_state()
    for index in range(2):
        handler.sharded_state(index)["k"] = torch.ones(index + 1)
    assert handler.global_state()["k"].shape == (3,)
    handler.global_state()["given"] = rows(3, 4)
    assert handler.sharded_state(0)["given"].shape == (3, 2)
