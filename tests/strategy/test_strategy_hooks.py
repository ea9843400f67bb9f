"""Hooks, callbacks and evaluation on a pipeline of two, against one device."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import BasePredictionWriter
from torch.utils.data import DataLoader, TensorDataset

from d9d_lightning.testing import run_distributed
from tests.strategy.evaluation_cases import evaluate_unfitted
from tests.strategy.logging_cases import log_everywhere
from tests.strategy.strategy_cases import QUIET, Classifier, fit, largest_difference, make_data, make_loader, pipeline


class Hooked(Classifier):
    """What users write in hooks: collected outputs, metrics by hand, curricula, averages, frozen parts."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.by_hand = torchmetrics.classification.MulticlassAUROC(num_classes=3)
        self.metrics = torchmetrics.MetricCollection(
            {"f1": torchmetrics.F1Score("multiclass", num_classes=3), "cat": torchmetrics.CatMetric()}
        )
        self.temperature = 1.0
        self.average = None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits = self.loss_of(batch)
        self.collected.append(loss.detach() * len(logits))
        self.log("temperature", self.temperature)
        return {"loss": loss / self.temperature, "logits": logits}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("spread", outputs["logits"].std(), on_step=True, on_epoch=True)
        self.outputs.append(outputs["logits"].shape[0])

    def on_train_epoch_end(self) -> None:
        self.log("collected", torch.stack(self.collected).sum())
        self.collected.clear()
        self.temperature *= 2
        for parameter in self.net[0].parameters():
            parameter.requires_grad_(False)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss, logits = self.loss_of(batch)
        self.by_hand.update(logits.softmax(1), batch[1])
        self.metrics["f1"].update(logits, batch[1])
        self.metrics["cat"].update(logits[:, 0])
        self.log("val_loss", loss)
        return logits

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.collected.append(outputs.mean())

    def on_validation_epoch_start(self) -> None:
        self.kept, self.collected = self.collected, []

    def on_validation_epoch_end(self) -> None:
        self.log("auroc", self.by_hand.compute(), prog_bar=True)
        self.by_hand.reset()
        self.log("f1", self.metrics["f1"].compute())
        self.log("cat", self.metrics["cat"].compute().mean())
        self.metrics.reset()
        self.log("mean_output", torch.stack(self.collected).mean())
        self.collected = self.kept


def numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in sorted(metrics.items())}


def run_hooked(strategy: Any, devices: int, folder: str) -> dict[str, Any]:
    # no sample twice: scores that tie up to rounding have no order
    features, labels = make_data(10).tensors
    loaders = [make_loader(), DataLoader(TensorDataset(features * 0.9, labels), batch_size=5)]
    module, trainer, seen = fit(strategy, Hooked, val=loaders, devices=devices, max_epochs=3)
    trainer.save_checkpoint(f"{folder}/{devices}.ckpt")
    return {
        "metrics": seen.metrics,
        "end": numbers(trainer.callback_metrics),
        "losses": seen.losses,
        "sizes": module.outputs,
        "temperature": module.temperature,
        "frozen": [p.requires_grad for p in module.net[0].parameters()],
    }


def hooked_on_two(folder: str) -> dict[str, Any]:
    hooked = run_hooked(pipeline(schedule="1f1b"), 2, folder)
    return {**hooked, "everywhere": log_everywhere(pipeline(schedule="1f1b"), 2)}


def check_logged_everywhere(rank: dict[str, Any], one: dict[str, Any]) -> None:
    """Loggers see the same keys; counts of calls and scores are the same to the last bit."""
    for part in ("batches", "ends"):
        for ours, theirs in zip(rank[part], one[part], strict=True):
            assert ours == pytest.approx(theirs, abs=2e-6)
            is_exact = ("module/", "callback/"), ("Accuracy", "F1Score")
            exact = [key for key in theirs if key.startswith(is_exact[0]) or key.endswith(is_exact[1])]
            assert {key: ours[key] for key in exact} == {key: theirs[key] for key in exact}


def test_hooks_of_a_module_work_as_written_on_every_rank(tmp_path):
    """What hooks and callbacks log, collect, compute and change gives one device's numbers on both ranks."""
    ranks = run_distributed(hooked_on_two, 2, (str(tmp_path),), init_group=False)
    one = run_hooked("auto", 1, str(tmp_path))
    everywhere = log_everywhere("auto", 1)
    for rank in ranks:
        check_logged_everywhere(rank["everywhere"], everywhere)
        assert rank["losses"] == pytest.approx(one["losses"], abs=2e-6)
        assert rank["end"] == pytest.approx(one["end"], abs=2e-5)
        for ours, theirs in zip(rank["metrics"], one["metrics"], strict=True):
            assert ours == pytest.approx(theirs, abs=2e-5)
        for key in ("sizes", "temperature", "frozen"):
            assert rank[key] == one[key]
    states = [torch.load(tmp_path / f"{n}.ckpt", weights_only=True)["state_dict"] for n in (1, 2)]
    assert largest_difference(*states) < 5e-6


class Writer(BasePredictionWriter):
    """Keeps the indices of what it is given."""

    def __init__(self) -> None:
        super().__init__("batch")
        self.indices: list[Any] = []

    def write_on_batch_end(self, trainer, pl_module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        self.indices.append((batch_indices, len(prediction)))


def evaluate(strategy: Any, devices: int) -> dict[str, Any]:
    L.seed_everything(7, verbose=False)
    module = Classifier()
    writer = Writer()
    trainer = L.Trainer(strategy=strategy, devices=devices, max_epochs=1, callbacks=[writer], **QUIET)
    before = trainer.validate(module, make_loader(), verbose=False)
    trainer.fit(module, make_loader())
    module.net[1].eval()
    tested = trainer.test(module, make_loader(11, 4), verbose=False)
    modes = [child.training for child in module.modules()]
    after = trainer.validate(module, make_loader(), verbose=False)
    predicted = trainer.predict(module, make_loader(23, 6))
    return {
        "before": [numbers(one) for one in before],
        "tested": [numbers(one) for one in tested],
        "after": [numbers(one) for one in after],
        "modes": modes,
        "predicted": None if predicted is None or predicted[0] is None else torch.cat(predicted),
        "indices": writer.indices,
    }


def evaluate_on_two(schedules: list[str]) -> dict[str, Any]:
    found = {}
    for schedule in schedules:
        strategy = partial(pipeline, schedule=schedule)
        found[schedule] = {**evaluate(strategy(), 2), "unfitted": evaluate_unfitted(strategy, 2)}
    return found


def check_unfitted(first: dict[str, Any], second: dict[str, Any], one: dict[str, Any]) -> None:
    """Tests have one device's values on both ranks, rank 0 alone has the predictions."""
    for rank in (first, second):
        for ours, theirs in zip(rank["tested"], one["tested"], strict=True):
            assert ours == pytest.approx(theirs, abs=2e-6)
    for key in ("several", "limited", "written"):
        torch.testing.assert_close(first[key], one[key], rtol=1e-4, atol=2e-6)
    assert first["indices"] == one["indices"]
    assert (second["written"], second["indices"], second["limited"]) == (None, None, [None, None])


def test_validate_test_and_predict_work_in_any_order():
    """Evaluation before, after and without a fit equals one device; predict gives rank 0 every sample once."""
    schedules = ["zbv", "1f1b", "interleaved_1f1b"]
    ranks = run_distributed(evaluate_on_two, 2, (schedules,), init_group=False)
    one, unfitted = evaluate("auto", 1), evaluate_unfitted(lambda: "auto", 1)
    for schedule in schedules:
        first, second = (rank[schedule] for rank in ranks)
        for rank in (first, second):
            for key in ("before", "tested", "after"):
                assert rank[key] == [pytest.approx(expected, abs=2e-6) for expected in one[key]]
            assert rank["modes"] == one["modes"]
        torch.testing.assert_close(first["predicted"], one["predicted"], rtol=1e-4, atol=2e-6)
        assert first["indices"] == one["indices"]
        assert second["indices"] == []
        check_unfitted(first["unfitted"], second["unfitted"], unfitted)
