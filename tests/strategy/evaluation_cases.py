"""Evaluation without a fit before it, in every shape of loader that a Trainer takes."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import BasePredictionWriter

from tests.strategy.strategy_cases import QUIET, Classifier, make_loader


class EpochWriter(BasePredictionWriter):
    """Keeps what it is given at the end of an epoch of predictions."""

    def __init__(self) -> None:
        super().__init__("epoch")
        self.predictions: Any = None
        self.indices: Any = None

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.predictions, self.indices = predictions, batch_indices


class Deep(Classifier):
    """Enough layers for two stages a rank, and steps that take one loader or several."""

    def __init__(self) -> None:
        super().__init__(width=7)
        self.net = torch.nn.Sequential(*self.net[:-1], torch.nn.Linear(7, 7), torch.nn.ReLU(), self.net[-1])

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.net(batch[0])


def evaluate_unfitted(strategy: Any, devices: int) -> dict[str, Any]:
    """Test and predict with fresh Trainers, and a batch of one and of two samples among them."""
    L.seed_everything(7, verbose=False)
    module, writer = Deep(), EpochWriter()

    def make(**options: Any) -> L.Trainer:
        return L.Trainer(strategy=strategy(), devices=devices, **QUIET, **options)

    tested = make(limit_test_batches=2).test(module, make_loader(11, 4), verbose=False)
    small = make().test(module, [make_loader(7, 6), make_loader(2, 2)], verbose=False)
    several = make(callbacks=[writer]).predict(module, [make_loader(7, 6), make_loader(5, 3)])
    limited = make(limit_predict_batches=2).predict(module, make_loader(23, 6))
    return {
        "tested": [dict(one) for one in (*tested, *small)],
        "several": several,
        "limited": limited,
        "written": writer.predictions,
        "indices": writer.indices,
    }
