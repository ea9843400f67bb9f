"""All ranks of a pipeline see the same batches, in one device's order, whatever the loader does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

from d9d_lightning.testing import collect_outcomes, run_distributed
from tests.strategy.strategy_cases import QUIET, Classifier, Losses, make_data, pipeline


class Augmented(Dataset):
    """Draws from every random generator for every sample."""

    def __init__(self) -> None:
        self.data = make_data()

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        features, label = self.data[index]
        noise = torch.rand(()).item() + random.random() + numpy.random.rand()
        return features + noise, label


class Stream(IterableDataset):
    """Has no length, and shuffles by itself."""

    def __iter__(self):
        data = make_data()
        yield from (data[int(index)] for index in torch.randperm(len(data)))


class Backwards:
    """A sampler without a base class, which counts how often it was asked."""

    def __len__(self) -> int:
        return 22

    def __iter__(self):
        return iter(range(21, -1, -1))


@dataclass
class Labelled:
    """A batch with names, and something that is not a tensor."""

    features: torch.Tensor
    labels: torch.Tensor
    source: str = "here"


class Batches:
    """A loader of one's own: iterable, as often as wanted, and nothing else."""

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, 22, 6):
            features, labels = make_data()[start : start + 6]
            yield Labelled(features + torch.rand(()), labels)


def label(items: list[Any]) -> Labelled:
    return Labelled(*(torch.stack(column) for column in zip(*items, strict=True)))


LOADERS: dict[str, Any] = {
    "shuffled": lambda: DataLoader(make_data(), batch_size=6, shuffle=True),
    "in order": lambda: DataLoader(make_data(), batch_size=6),
    "weighted": lambda: DataLoader(
        make_data(), batch_size=6, sampler=WeightedRandomSampler([1.0] * 11 + [5.0] * 11, 20)
    ),
    "own generator": lambda: DataLoader(
        make_data(), batch_size=6, sampler=RandomSampler(make_data(), generator=torch.Generator().manual_seed(5))
    ),
    "custom sampler": lambda: DataLoader(make_data(), batch_size=6, sampler=Backwards()),
    "augmented": lambda: DataLoader(Augmented(), batch_size=6, shuffle=True),
    "augmented in a worker": lambda: DataLoader(Augmented(), batch_size=6, shuffle=True, num_workers=1),
    "stream": lambda: DataLoader(Stream(), batch_size=6),
    "dataclass": lambda: DataLoader(make_data(), batch_size=6, shuffle=True, collate_fn=label),
    "dataclass from an iterable": Batches,
    "generator": lambda: (batch for batch in DataLoader(make_data(), batch_size=6)),
    "several": lambda: {
        "first": DataLoader(make_data(), batch_size=6, shuffle=True),
        "second": DataLoader(make_data(9), batch_size=3, shuffle=True),
    },
}


class Either(Classifier):
    """Takes one loader or several, of pairs or of :class:`Labelled`."""

    def loss_of(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if isinstance(batch, Labelled):
            batch = (batch.features, batch.labels) if batch.source == "here" else ()
        return super().loss_of(batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batches = batch.values() if isinstance(batch, dict) else [batch]
        return sum(self.loss_of(one)[0] for one in batches)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss_of(batch)[0])


def losses_of(name: str, strategy: Any, devices: int, **options: Any) -> list[float]:
    """Losses of a fit, and after them the one of validation."""
    L.seed_everything(7, verbose=False)
    seen = Losses()
    settings = {**QUIET, "max_epochs": 2, **options}
    trainer = L.Trainer(strategy=strategy, devices=devices, callbacks=[seen], **settings)
    # several loaders are several validations, which is another matter
    trainer.fit(Either(), LOADERS[name](), None if name == "several" else LOADERS[name]())
    return [*seen.losses, float(trainer.callback_metrics.get("val_loss", 0))]


def all_losses_on_two(names: list[str], options: dict[str, Any]) -> dict[str, list[float]]:
    microbatches = {"several": 1}
    return {n: losses_of(n, pipeline(**{"num_microbatches": microbatches.get(n, 3), **options}), 2) for n in names}


@pytest.mark.parametrize("broadcast", [False, pytest.param(True, marks=pytest.mark.full)])
def test_every_kind_of_loader_gives_one_devices_batches(broadcast):
    """Loaders of every kind, of pairs and of dataclasses, give both ranks one device's batches."""
    # a worker's draws are seeded by the loader, a stream's by the running generator: both are compared too
    names = list(LOADERS)
    first, second = run_distributed(
        all_losses_on_two, 2, (names, {"broadcast_batches": broadcast}), init_group=False, timeout=240.0
    )
    for name in names:
        assert first[name] == second[name], name
        assert first[name] == pytest.approx(losses_of(name, "auto", 1), abs=1e-5), name


class LoadsOnce(Dataset):
    """Refuses to be read on rank 1, except for the first look."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if torch.distributed.get_rank() == 1:
            raise RuntimeError("rank 1 has no data")
        return make_data(12)[index]


def broadcast_only() -> int:
    strategy = pipeline(broadcast_batches=True)
    trainer = L.Trainer(strategy=strategy, devices=2, max_epochs=1, **QUIET)
    trainer.fit(Either(), DataLoader(LoadsOnce(), batch_size=6))
    return trainer.global_step


def test_broadcast_batches_reads_on_one_rank_only():
    """With ``broadcast_batches=True`` only the first rank of a pipeline touches the dataset."""
    assert run_distributed(broadcast_only, 2, init_group=False) == [2, 2]


class Disagrees(Dataset):
    """Other data on every rank."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        rank = float(torch.distributed.get_rank())
        return torch.full((4,), rank + index), torch.tensor(index % 3)


def disagree() -> None:
    trainer = L.Trainer(strategy=pipeline(), devices=2, max_epochs=1, **QUIET)
    trainer.fit(Either(), DataLoader(Disagrees(), batch_size=6))


def test_ranks_that_load_other_batches_are_told():
    """Batches that differ between the ranks of a pipeline raise on all of them, and the error says what to do."""
    outcomes = collect_outcomes(disagree, 2, init_group=False, timeout=60.0)
    assert all(outcome.error is not None for outcome in outcomes)
    assert all("broadcast_batches=True" in (outcome.error or "") for outcome in outcomes)
