"""A ``torch.distributed.checkpoint`` directory as mappings that read an entry when it is asked for.

Resuming gives every rank the checkpoint before it is known what the rank owns, and hooks may change it on the way. So
names and shapes are there at once, and the tensors of a rank are read when it takes them: no rank reads the others'.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

__all__ = ["StoredEntries", "StoredMapping", "shape_in", "take_from"]

_UNREAD = object()


class StoredEntries:
    """The entries of a directory: each has a name of its own and a path of keys in the dict that was saved.

    Args:
        directory: One that ``torch.distributed.checkpoint`` has written.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._reader = FileSystemReader(directory)
        self._metadata = self._reader.read_metadata()
        places = self._metadata.planner_data or {}
        self.paths: dict[str, tuple[str | int, ...]] = {
            name: tuple(places.get(name, (name,))) for name in self._metadata.state_dict_metadata
        }

    def below(self, prefix: tuple[str | int, ...]) -> dict[str, tuple[str | int, ...]]:
        """Entries whose path begins with a prefix, and the rest of their paths."""
        length = len(prefix)
        return {name: path[length:] for name, path in self.paths.items() if path[:length] == prefix}

    def shape(self, name: str) -> torch.Size | None:
        """Shape of an entry; None for what is not a tensor."""
        stored = self._metadata.state_dict_metadata[name]
        return stored.size if isinstance(stored, TensorStorageMetadata) else None

    def read(self, names: Iterable[str]) -> dict[str, Any]:
        """Read some entries, and nothing else, without communication."""
        wanted: dict[str, Any] = {}
        for name in names:
            stored = self._metadata.state_dict_metadata[name]
            wanted[name] = None
            if isinstance(stored, TensorStorageMetadata):
                wanted[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
        planner = DefaultLoadPlanner()
        planner.set_up_planner(wanted, self._metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        self._reader.read_data(planner.finish_plan(plan), planner).wait()
        return wanted

    def read_nested(self, prefix: tuple[str | int, ...], without: tuple[str | int, ...] | None = None) -> Any:
        """Read everything below a prefix into dicts and lists, as it was saved.

        Args:
            prefix: First keys of the path.
            without: First keys of what is left out.
        """
        left_out = self.below(without).keys() if without is not None else ()
        places = {name: rest for name, rest in self.below(prefix).items() if name not in left_out}
        values = self.read(places)
        return _nest({rest: values[name] for name, rest in places.items()})


def _nest(values: Mapping[tuple[str | int, ...], Any]) -> Any:
    """Dicts and lists from paths; a key that is a number is a place in a list."""
    if () in values:
        return values[()]
    below: dict[str | int, dict[tuple[str | int, ...], Any]] = {}
    for path, value in values.items():
        below.setdefault(path[0], {})[path[1:]] = value
    nested = {key: _nest(rest) for key, rest in below.items()}
    if nested and all(isinstance(key, int) for key in nested):
        return [nested[index] for index in sorted(nested)]
    return nested


class StoredMapping(MutableMapping[str, Any]):
    """What a directory holds below a prefix, one key each; a value is read when it is asked for, and then kept.

    >>> parameters = StoredMapping(StoredEntries("last.ckpt"), ("model",))

    Changing it changes nothing in the directory.

    Args:
        entries: Those of the directory.
        prefix: First keys of the path.
    """

    def __init__(self, entries: StoredEntries, prefix: tuple[str | int, ...]) -> None:
        self._entries = entries
        self._prefix = prefix
        self._names: dict[str, list[str]] = {}
        for name, rest in entries.below(prefix).items():
            self._names.setdefault(str(rest[0]), []).append(name)
        self._values: dict[str, Any] = dict.fromkeys(self._names, _UNREAD)

    def __getitem__(self, key: str) -> Any:
        """One value."""
        if self._values[key] is _UNREAD:
            self._values[key] = self.take([key])[key]
        return self._values[key]

    def __setitem__(self, key: str, value: Any) -> None:
        """Put another value in."""
        self._values[key] = value

    def __delitem__(self, key: str) -> None:
        """Leave a key out."""
        del self._values[key]

    def __iter__(self) -> Iterator[str]:
        """The keys."""
        return iter(self._values)

    def __len__(self) -> int:
        """Number of keys."""
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        """Whether there is such a key; reads nothing."""
        return key in self._values

    def copy(self) -> dict[str, Any]:
        """A dict of all values, as ``dict.copy`` gives it."""
        return dict(self)

    def shape_of(self, key: str) -> torch.Size | None:
        """Shape of a value without reading it; None for what is no single tensor."""
        value = self._values[key]
        if value is not _UNREAD:
            return value.shape if isinstance(value, torch.Tensor) else None
        names = self._names[key]
        is_single = len(names) == 1 and self._entries.paths[names[0]] == (*self._prefix, key)
        return self._entries.shape(names[0]) if is_single else None

    def take(self, keys: Iterable[str]) -> dict[str, Any]:
        """Several values, read together and not kept here."""
        chosen = list(keys)
        names = [name for key in chosen if self._values[key] is _UNREAD for name in self._names[key]]
        read = self._entries.read(names) if names else {}
        length = len(self._prefix)
        nested = _nest({self._entries.paths[name][length:]: value for name, value in read.items()})
        return {key: nested[key] if self._values[key] is _UNREAD else self._values[key] for key in chosen}


def shape_in(state: Mapping[str, Any], key: str) -> torch.Size | None:
    """Shape of a tensor in a state dict, read or not; None where there is none."""
    if isinstance(state, StoredMapping):
        return state.shape_of(key) if key in state else None
    value = state.get(key)
    return value.shape if isinstance(value, torch.Tensor) else None


def take_from(state: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Some entries of a state dict, read together where they are not read yet."""
    return state.take(keys) if isinstance(state, StoredMapping) else {key: state[key] for key in keys}
