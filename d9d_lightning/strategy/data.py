"""One batch to look at before training starts, taken without changing what training will see."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from d9d_lightning.strategy.compat import TrainerFn, collect_rng_states, set_rng_states

__all__ = ["STEP_OF", "peek_batch"]

STEP_OF = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}


class _PushBack:
    """An iterator that first gives back what was taken from it."""

    def __init__(self, first: Any, rest: Iterator[Any]) -> None:
        self._taken = [first]
        self._rest = rest

    def __iter__(self) -> _PushBack:
        return self

    def __next__(self) -> Any:
        return self._taken.pop() if self._taken else next(self._rest)


def peek_batch(trainer: Trainer, module: LightningModule) -> Any | None:
    """A batch as the step will get it, or None where none can be had without consuming data.

    A map-style dataset gives its first items, collated; random state is as before. Any other loader gives its first
    batch, which the loop then gets again: what it drew, it drew for the loop.
    """
    fn = trainer.state.fn
    if fn is None or fn not in STEP_OF:
        return None
    loop = _loop(trainer)
    # this the loop would do itself a little later, random draws included
    loop.setup_data()
    batch = _raw_batch(loop, fn)
    if batch is None:
        return None
    states = collect_rng_states()
    try:
        batch = trainer.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)
    finally:
        set_rng_states(states)


def _raw_batch(loop: Any, fn: TrainerFn) -> Any | None:
    combined = loop._combined_loader
    if combined is None or not combined.flattened:
        return None
    if fn != TrainerFn.FITTING:
        # evaluation takes one loader after the other; its fetcher does not exist yet
        return _first_items(combined.flattened[0])
    if all(_is_map_style(loader) for loader in combined.flattened):
        items = [_first_items(loader) for loader in combined.flattened]
        if all(item is not None for item in items):
            return _unflatten(combined, items)
    return _first_of_fetcher(loop._data_fetcher)


def _loop(trainer: Trainer) -> Any:
    return {
        TrainerFn.FITTING: trainer.fit_loop,
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }[trainer.state.fn]  # type: ignore[index]


def _is_map_style(loader: object) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _unflatten(combined: CombinedLoader, items: list[Any]) -> Any:
    remaining = iter(items)
    is_loader = {id(loader) for loader in combined.flattened}
    return tree_map(
        lambda leaf: next(remaining) if id(leaf) in is_loader else leaf,
        combined.iterables,
        is_leaf=lambda leaf: id(leaf) in is_loader,
    )


def _first_items(loader: object) -> Any | None:
    """First batch of a map-style loader, or of a container of batches; None for anything else."""
    if isinstance(loader, (list, tuple)):
        return copy.deepcopy(loader[0]) if loader else None
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    states = collect_rng_states()
    try:
        return _collate_first(loader)
    except (IndexError, KeyError, TypeError):
        # indices of a custom sampler need not be numbers from 0
        return None
    finally:
        set_rng_states(states)


def _collate_first(loader: DataLoader[Any]) -> Any | None:
    dataset: Any = loader.dataset
    if loader.batch_size is None and loader.batch_sampler is None:
        return loader.collate_fn(dataset[0])
    count = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 2
    items = [dataset[index] for index in range(min(count, len(dataset)))]
    return loader.collate_fn(items) if items else None


def _first_of_fetcher(fetcher: Any) -> Any | None:
    if fetcher is None:
        return None
    waiting = getattr(fetcher, "batches", None)
    if waiting:
        return copy.deepcopy(waiting[0][0])
    try:
        first = next(fetcher.iterator)
    except StopIteration:
        return None
    fetcher.iterator = _PushBack(first, fetcher.iterator)
    return copy.deepcopy(first[0])
