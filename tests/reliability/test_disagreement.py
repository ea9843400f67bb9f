"""Ranks that were not started alike, or are given different things, are told so before they can hurt."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from d9d_lightning import D9DStrategy
from d9d_lightning.testing import collect_outcomes, run_distributed
from tests.strategy.strategy_cases import QUIET

LIMIT_S = 30.0


class Small(L.LightningModule):
    """A few layers; rank 1 may have others."""

    def __init__(self, width: int = 8, layers: int = 4, backwards: bool = False) -> None:
        super().__init__()
        self.backwards = backwards
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0][:, : self.layers[0].in_features]
        for layer in reversed(self.layers) if self.backwards else self.layers:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Endless(IterableDataset[Any]):
    """Samples without a length."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return iter([(row,) for row in self.data])


def fit(what: str) -> int:
    """Train on two processes; the second one differs in ``what``. Returns the number of steps."""
    rank = int(os.environ["RANK"])
    L.seed_everything(3, verbose=False)
    odd = rank == 1
    if odd and what == "torchmetrics":
        torchmetrics.__version__ = "0.0.1"
    module = Small(
        width=6 if odd and what == "width" else 8,
        layers=5 if odd and what == "layers" else 4,
        backwards=odd and what == "plan",
    )
    seed = 1 if odd and what == "batches" else 0
    data = torch.randn(12, 8, generator=torch.Generator().manual_seed(seed))
    if odd and what in ("length", "stream"):
        data = torch.cat([data, data])
    trainer = L.Trainer(
        **QUIET,
        devices=2,
        max_epochs=1,
        strategy=D9DStrategy(
            "gpipe" if odd and what == "schedule" else "1f1b",
            num_microbatches=4 if odd and what == "microbatches" else 2,
        ),
    )
    samples = Endless(data) if what == "stream" else TensorDataset(data)
    trainer.fit(module, DataLoader(samples, batch_size=6 if odd and what == "batch size" else 4))
    return trainer.global_step


TOLD = {
    "width": "parameters and buffers",
    "layers": "parameters and buffers",
    "torchmetrics": "torchmetrics: rank 0 has",
    "schedule": "D9DStrategy(schedule): rank 0 has 1f1b, rank 1 has gpipe",
    "microbatches": "D9DStrategy(num_microbatches): rank 0 has 2, rank 1 has 4",
    "plan": "ranks made different placements",
    "batches": "different batches",
    "batch size": "different batches",
}


QUICK = ("width", "batches")


@pytest.mark.parametrize(
    "what", [what if what in QUICK else pytest.param(what, marks=pytest.mark.full) for what in TOLD]
)
def test_ranks_that_differ_are_told_in_what(what: str) -> None:
    """Another module, argument, package version, batch or batch size on one rank raises on both, by name."""
    outcomes = collect_outcomes(fit, 2, (what,), init_group=False, timeout=LIMIT_S, fresh=True)
    assert all(outcome.error is not None for outcome in outcomes), outcomes
    assert all(TOLD[what] in str(outcome.error) for outcome in outcomes), [outcome.error for outcome in outcomes]


@pytest.mark.full
@pytest.mark.parametrize("what", ["length", "stream"])
def test_ranks_with_different_numbers_of_batches_end_together(what: str) -> None:
    """Where a loader of one rank has more batches, known ahead or not, all train on as many as the shortest has."""
    assert run_distributed(fit, 2, (what,), init_group=False) == [3, 3]
