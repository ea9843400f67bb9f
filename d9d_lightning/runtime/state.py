"""Values at the edge of a batch, seen whole or by microbatch: batch fields, outputs, loss weights.

One store, two views: :meth:`PipelineStateHandler.global_state` reads and writes whole-batch values,
:meth:`PipelineStateHandler.sharded_state` those of one microbatch. A value keeps the form in which it was last
written; reading it in the other form derives that form anew and changes nothing. Nothing stored holds on to a graph.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from d9d_lightning.errors import PipelineStateError, PipelineStateMissingError
from d9d_lightning.runtime.containers import is_sequence, map_leaves, open_container
from d9d_lightning.runtime.sharding import SpecReplicate, SpecShard, shard_tree, unshard_tree

__all__ = ["PipelineState", "PipelineStateHandler"]


class PipelineState(ABC):
    """A view of the stored values, read and written like a dictionary."""

    @abstractmethod
    def __getitem__(self, key: str) -> Any:
        """The value of a key in the form of this view.

        Raises:
            PipelineStateMissingError: The key, or one of the shards it takes, was never written.
        """

    @abstractmethod
    def __setitem__(self, key: str, value: Any) -> None:
        """Stores a detached copy of a value."""

    @abstractmethod
    def __contains__(self, key: object) -> bool:
        """Whether the key can be read through this view."""


@dataclass(slots=True)
class _Whole:
    """A value that was last written for the whole batch."""

    value: Any


@dataclass(slots=True)
class _Shards:
    """A value that was last written by microbatch."""

    values: dict[int, Any] = field(default_factory=dict)


class PipelineStateHandler:
    """The store behind both views.

    The specification of a key is the caller's, or guessed when the key is first written: whole-batch tensors and lists
    are cut along dim 0, and other whole values replicated; tensors and lists of a microbatch are joined along dim 0,
    its 0-d tensors and plain objects stacked. Fields of mappings, dataclasses and tuples are guessed one by one.

    Args:
        sharding_spec: Specifications by key, as :func:`shard_tree` takes them. They outlive :meth:`reset`.
        num_shards: Number of microbatches.
        enforce_even_split: Refuse to cut a size that is no multiple of ``num_shards``.

    Raises:
        PipelineStateError: ``num_shards`` is not positive.
    """

    def __init__(
        self, sharding_spec: Mapping[str, Any] | None, num_shards: int, enforce_even_split: bool = False
    ) -> None:
        if num_shards < 1:
            raise PipelineStateError(f"num_shards is {num_shards}; expected at least 1")
        self._given_specs = dict(sharding_spec or {})
        self._guessed_specs: dict[str, Any] = {}
        self._num_shards = num_shards
        self._enforce_even_split = enforce_even_split
        self._entries: dict[str, _Whole | _Shards] = {}

    def global_state(self) -> PipelineState:
        """The view of whole-batch values."""
        return _GlobalView(self)

    def sharded_state(self, shard_id: int) -> PipelineState:
        """The view of the values of one microbatch.

        Raises:
            PipelineStateError: There is no such microbatch.
        """
        self._check_shard(shard_id)
        return _ShardView(self, shard_id)

    def reset(self) -> None:
        """Forgets all values and guessed specifications, and keeps the caller's."""
        self._entries.clear()
        self._guessed_specs.clear()

    def store_global(self, key: str, value: Any) -> None:
        """Stores a whole-batch value, in place of whatever the key had."""
        value = _detach(value)
        self._guess(key, value, _guess_from_whole)
        self._entries[key] = _Whole(value)

    def store_shard(self, key: str, value: Any, shard_id: int) -> None:
        """Stores the value of one microbatch.

        Raises:
            PipelineStateError: There is no such microbatch, or the key was last written for the whole batch.
        """
        self._check_shard(shard_id)
        entry = self._entries.get(key)
        if isinstance(entry, _Whole):
            raise PipelineStateError(
                f"{key!r} was last written for the whole batch, so shard {shard_id} of it cannot be replaced; write it "
                f"through global_state(), or call reset() first"
            )
        value = _detach(value)
        self._guess(key, value, _guess_from_shard)
        if entry is None:
            entry = self._entries[key] = _Shards()
        entry.values[shard_id] = value

    def acquire_global(self, key: str) -> Any:
        """The whole-batch value of a key.

        Raises:
            PipelineStateMissingError: The key, or one of its shards, was never written.
            PipelineStateError: The shards do not fit together.
        """
        entry = self._entry(key)
        if isinstance(entry, _Whole):
            return entry.value
        missing = [shard for shard in range(self._num_shards) if shard not in entry.values]
        if missing:
            raise PipelineStateMissingError(
                f"{key!r} lacks shards {missing} of {self._num_shards}; write all of them before it is read as a whole"
            )
        return unshard_tree([entry.values[shard] for shard in range(self._num_shards)], self._spec(key))

    def acquire_shard(self, key: str, shard_id: int) -> Any:
        """The value of one microbatch.

        Raises:
            PipelineStateMissingError: The key, or this shard of it, was never written.
            PipelineStateError: There is no such microbatch, or the whole value cannot be cut.
        """
        self._check_shard(shard_id)
        entry = self._entry(key)
        if isinstance(entry, _Whole):
            return shard_tree(entry.value, self._spec(key), self._num_shards, self._enforce_even_split)[shard_id]
        if shard_id not in entry.values:
            raise PipelineStateMissingError(
                f"{key!r} has no shard {shard_id}, only {sorted(entry.values)}; write it before it is read"
            )
        return entry.values[shard_id]

    def contains(self, key: object, shard_id: int | None = None) -> bool:
        """Whether a key can be read, as a whole or as one shard."""
        entry = self._entries.get(key) if isinstance(key, str) else None
        if isinstance(entry, _Shards):
            needed = range(self._num_shards) if shard_id is None else [shard_id]
            return all(shard in entry.values for shard in needed)
        return entry is not None

    def _check_shard(self, shard_id: int) -> None:
        if not 0 <= shard_id < self._num_shards:
            raise PipelineStateError(f"shard {shard_id} does not exist; expected one of 0 to {self._num_shards - 1}")

    def _entry(self, key: str) -> _Whole | _Shards:
        if key not in self._entries:
            known = ", ".join(map(repr, self._entries)) or "nothing"
            raise PipelineStateMissingError(f"{key!r} was never written; stored so far: {known}")
        return self._entries[key]

    def _spec(self, key: str) -> Any:
        return self._given_specs[key] if key in self._given_specs else self._guessed_specs[key]

    def _guess(self, key: str, value: Any, guess: Callable[[Any], Any]) -> None:
        if key not in self._given_specs and key not in self._guessed_specs:
            self._guessed_specs[key] = guess(value)


class _GlobalView(PipelineState):
    def __init__(self, handler: PipelineStateHandler) -> None:
        self._handler = handler

    def __getitem__(self, key: str) -> Any:
        return self._handler.acquire_global(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self._handler.store_global(key, value)

    def __contains__(self, key: object) -> bool:
        return self._handler.contains(key)


class _ShardView(PipelineState):
    def __init__(self, handler: PipelineStateHandler, shard_id: int) -> None:
        self._handler = handler
        self._shard_id = shard_id

    def __getitem__(self, key: str) -> Any:
        return self._handler.acquire_shard(key, self._shard_id)

    def __setitem__(self, key: str, value: Any) -> None:
        self._handler.store_shard(key, value, self._shard_id)

    def __contains__(self, key: object) -> bool:
        return self._handler.contains(key, self._shard_id)


def _detach(value: Any) -> Any:
    return map_leaves(value, lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)


def _has_rows(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim > 0)


def _guess_from_whole(value: Any) -> Any:
    if _has_rows(value):
        return SpecShard(0)
    return _guess_fields(value, _guess_from_whole, SpecReplicate())


def _guess_from_shard(value: Any) -> Any:
    if _has_rows(value):
        return SpecShard(0)
    return _guess_fields(value, _guess_from_shard, SpecShard(0, do_stack=True))


def _guess_fields(value: Any, guess: Callable[[Any], Any], otherwise: SpecShard | SpecReplicate) -> Any:
    opened = open_container(value)
    if opened is None:
        return otherwise
    specs = [guess(child) for child in opened.children]
    return specs if is_sequence(value) else dict(zip(opened.keys, specs, strict=True))
