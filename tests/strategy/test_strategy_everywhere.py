"""Logging from every hook, and evaluation without a fit, beside the plain Trainer."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.model_summary import ModelSummary

from d9d_lightning.testing import run_distributed
from tests.strategy.strategy_cases import QUIET, Classifier, make_loader, pipeline


class LogsEverywhere(Classifier):
    """Logs a collection, sizes of its own, and from hooks around the steps."""

    def __init__(self) -> None:
        super().__init__()
        kinds = {name: torchmetrics.Accuracy("multiclass", num_classes=3, average=name) for name in ("micro", "macro")}
        self.collection = torchmetrics.MetricCollection(kinds)

    def on_train_start(self) -> None:
        self.log("start", 1.5)

    def on_train_epoch_start(self) -> None:
        self.log("epoch_start", float(self.current_epoch))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("batch_start", float(batch_idx), on_step=True, on_epoch=True, batch_size=len(batch[0]))

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        loss, logits = self.loss_of(batch)
        self.collection.update(logits, batch[1])
        self.log_dict(self.collection, add_dataloader_idx=False)
        self.log("sized", loss, batch_size=len(batch[0]), prog_bar=True)
        self.log(f"own_{dataloader_idx}", loss, add_dataloader_idx=False)
        return loss

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("ended", float(batch_idx), batch_size=len(batch[0]))


class Logs(L.Callback):
    """Logs as a callback does."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("from_callback", outputs["loss"] * 2, on_step=True, on_epoch=True, batch_size=len(batch[0]))

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.log("callback_end", 4.0)


def log_everywhere(strategy: Any, devices: int, folder: str, loaders: int) -> list[dict[str, float]]:
    L.seed_everything(7, verbose=False)
    logger = CSVLogger(folder, name=None, version=f"{loaders}-{devices}")
    options = {**QUIET, "logger": logger, "callbacks": [Logs()], "max_epochs": 2, "log_every_n_steps": 1}
    trainer = L.Trainer(strategy=strategy, devices=devices, **options)
    val = [make_loader(11, 4), make_loader(7, 5)][:loaders]
    trainer.fit(LogsEverywhere(), make_loader(), val if loaders > 1 else val[0])
    kinds = (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics)
    return [{key: float(value) for key, value in kind.items()} for kind in kinds]


def log_everywhere_on_two(folder: str, loaders: int) -> list[dict[str, float]]:
    return log_everywhere(pipeline(), 2, folder, loaders)


def read_rows(path: Path) -> list[dict[str, float]]:
    with path.open() as file:
        return [{key: float(value) for key, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.mark.full
def test_logging_from_every_hook_equals_one_device(tmp_path):
    """All three kinds of metrics, on both ranks, and each row of the CSV file are those of one device."""
    ranks = run_distributed(log_everywhere_on_two, 2, (str(tmp_path), 1), init_group=False)
    one = log_everywhere("auto", 1, str(tmp_path), 1)
    assert {"start", "epoch_start", "from_callback_epoch", "callback_end", "ended", "micro"} <= one[0].keys()
    for rank in ranks:
        assert rank == [pytest.approx(kind, abs=3e-6) for kind in one]
    assert ranks[0] == ranks[1]
    ours, theirs = (read_rows(tmp_path / f"1-{devices}" / "metrics.csv") for devices in (2, 1))
    assert ours == [pytest.approx(row, abs=3e-6) for row in theirs]


class EpochWriter(BasePredictionWriter):
    """Keeps what it is given at the end."""

    def __init__(self) -> None:
        super().__init__("epoch")
        self.indices: list[Any] = []

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.indices.append(batch_indices)


class Predicts(Classifier):
    """Predicts from several loaders."""

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        return self.net(batch[0]) + dataloader_idx


def evaluate_alone(strategy: Any, devices: int) -> dict[str, Any]:
    L.seed_everything(7, verbose=False)
    module, writer = Predicts(), EpochWriter()
    options = {**QUIET, "callbacks": [writer], "limit_test_batches": 2, "limit_predict_batches": 2}
    trainer = L.Trainer(strategy=strategy, devices=devices, **options)
    predicted = trainer.predict(module, [make_loader(9, 4), make_loader(5, 4)])
    tested = trainer.test(module, [make_loader(5, 4), make_loader(11, 2)], verbose=False)
    return {
        "predicted": predicted,
        "tested": [dict(row) for row in tested],
        "indices": writer.indices,
        "parameters": ModelSummary(module).total_parameters,
    }


def evaluate_alone_on_two(schedule: str) -> dict[str, Any]:
    return evaluate_alone(pipeline(schedule=schedule), 2)


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["zbv", "gpipe"])
def test_evaluation_without_a_fit_equals_one_device(schedule):
    """Several limited loaders with a batch of one sample are predicted and tested as on one device, without a fit."""
    first, second = run_distributed(evaluate_alone_on_two, 2, (schedule,), init_group=False)
    one = evaluate_alone("auto", 1)
    for rank in (first, second):
        assert rank["tested"] == [pytest.approx(row, abs=2e-6) for row in one["tested"]]
        assert rank["parameters"] == one["parameters"]
    torch.testing.assert_close(first["predicted"], one["predicted"], rtol=1e-4, atol=2e-6)
    assert first["indices"] == one["indices"]
