"""Loaders that give every rank of a pipeline the same batches, and all ranks the same number of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.distributed import ProcessGroup

from d9d_lightning.errors import PipelineConfigurationError
from d9d_lightning.strategy.messages import Messenger

__all__ = ["BroadcastLoader", "TogetherLoader", "length_of", "wrap_loader"]


def length_of(loader: Any) -> int | None:
    """Number of batches, or None where the loader does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


class _Wrapper:
    """A loader around another one; samplers, datasets and settings are those of the inner one."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)


class BroadcastLoader(_Wrapper):
    """Loads on the first process of a pipeline and sends every batch to the others.

    Args:
        loader: The user's loader.
        messenger: From the first process to the others.
    """

    def __init__(self, loader: Any, messenger: Messenger) -> None:
        super().__init__(loader)
        self._messenger = messenger

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # not a generator itself: the user's loader draws its seed when it is asked for an iterator
        return self._follow(iter(self._loader) if self._messenger.is_source else iter(()))

    def _follow(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            there, batch = self._messenger.share(lambda: _next(batches))
            if not there:
                return
            yield batch


class TogetherLoader(_Wrapper):
    """Ends on all ranks together, as soon as any of them has no batch left.

    Args:
        loader: The user's loader.
        group: A gloo group of all processes.
        length: Number of batches that all ranks have; None where that is not known.
    """

    def __init__(self, loader: Any, group: ProcessGroup, length: int | None) -> None:
        super().__init__(loader)
        self._group = group
        self._length = length

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("this loader has no length")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        return self._follow(iter(self._loader))

    def _follow(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            there, batch = _next(batches)
            everywhere = torch.tensor(int(there))
            dist.all_reduce(everywhere, dist.ReduceOp.MIN, group=self._group)
            if not everywhere:
                return
            yield batch


def _next(batches: Iterator[Any]) -> tuple[bool, Any]:
    for batch in batches:
        return True, batch
    return False, None


def wrap_loader(loader: Any, messenger: Messenger, world: ProcessGroup | None, *, broadcast: bool) -> Any:
    """Wrap a loader where that is needed; collective over the world.

    Args:
        loader: The user's loader, with Lightning's sampler.
        messenger: From the first process of this pipeline to the others.
        world: A gloo group of all processes; None for a single one.
        broadcast: ``D9DStrategy(broadcast_batches=...)``.

    Raises:
        PipelineConfigurationError: Some ranks know the length of their loader and others do not.
    """
    if world is None:
        return loader
    if broadcast and messenger.group is not None:
        loader = BroadcastLoader(loader, messenger)
    lengths: list[int | None] = [None] * dist.get_world_size(world)
    dist.all_gather_object(lengths, length_of(loader), group=world)
    known = [length for length in lengths if length is not None]
    if not known:
        return TogetherLoader(loader, world, None)
    if len(known) != len(lengths):
        raise PipelineConfigurationError(
            f"the loader has a length on some ranks and none on others: {lengths}. Build it the same way on every rank."
        )
    if len(set(known)) == 1:
        return loader
    rank_zero_warn(
        f"the loaders of the ranks have different lengths: {known}. All of them end after {min(known)} batches. Give "
        "every rank the same data, or use Trainer(limit_train_batches=...)."
    )
    return TogetherLoader(loader, world, min(known))
