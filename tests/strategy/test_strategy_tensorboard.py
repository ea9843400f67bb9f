"""TensorBoard: rank 0 of a pipeline writes one file of events, with the numbers of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import TensorBoardLogger
from torch import nn

from d9d_lightning.testing import run_distributed
from tests.strategy.strategy_cases import Classifier, fit, make_loader, pipeline

accumulator = pytest.importorskip(
    "tensorboard.backend.event_processing.event_accumulator", reason="needs `pip install tensorboard`"
)


class Writes(Classifier):
    """Logs, and writes to the logger by hand as well: within the step, before its end and at it, and in hooks."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        hidden = self.net[0](batch[0])
        self.logger.experiment.add_scalar("by_hand/hidden", hidden.mean(), self.global_step)
        if isinstance(self.trainer.logger, TensorBoardLogger):
            self.logger.log_metrics({"by_hand/batch": batch_idx}, self.global_step)
        loss = nn.functional.cross_entropy(self.net[1:](hidden), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.loggers[0].experiment.add_scalar("by_hand/loss", loss, self.global_step)
        return loss

    def on_train_epoch_end(self) -> None:
        self.logger.log_metrics({"by_hand/epoch": float(self.current_epoch)}, self.global_step)
        self.logger.experiment.add_text("note", f"epoch {self.current_epoch}", self.global_step)


def train(folder: str, devices: int, schedule: str = "zbv") -> str:
    logger = TensorBoardLogger(folder, name=f"on{devices}", default_hp_metric=True)
    strategy = pipeline(schedule=schedule, num_microbatches=1) if devices > 1 else "auto"
    options = {"devices": devices, "log_every_n_steps": 1, "callbacks": [LearningRateMonitor()]}
    fit(strategy, Writes, loader=make_loader(), val=make_loader(), logger=logger, **options)
    return str(logger.log_dir)


def events_of(folder: str) -> dict[str, list[tuple[int, float]]]:
    """Every scalar of a run with its steps."""
    found = accumulator.EventAccumulator(folder, size_guidance={"scalars": 0, "tensors": 0})
    found.Reload()
    scalars = {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}
    texts = {tag: [(event.step, 0.0) for event in found.Tensors(tag)] for tag in found.Tags()["tensors"]}
    return scalars | texts


@pytest.mark.parametrize("schedule", ["zbv", pytest.param("1f1b", marks=pytest.mark.full)])
def test_one_file_of_events_with_the_scalars_of_one_device(tmp_path, schedule):
    """Tags, steps and values in TensorBoard are those of one device, written once, in one directory for all ranks."""
    plain = train(str(tmp_path), 1)
    ours, same = run_distributed(train, 2, (str(tmp_path), 2, schedule), init_group=False)
    assert ours == same
    files = [sorted(path.name.partition(".tfevents")[0] for path in Path(run).iterdir()) for run in (plain, ours)]
    assert files == [["events.out", "hparams.yaml"]] * 2
    assert [path.name for path in (tmp_path / "on2").iterdir()] == ["version_0"]
    expected, found = events_of(plain), events_of(ours)
    assert found.keys() == expected.keys()
    assert {
        "loss_step",
        "val_accuracy",
        "hp_metric",
        "by_hand/hidden",
        "by_hand/loss",
        "lr-AdamW",
        "note/text_summary",
    } <= found.keys()
    for tag, events in expected.items():
        assert [step for step, _ in found[tag]] == [step for step, _ in events], tag
        assert [value for _, value in found[tag]] == pytest.approx([value for _, value in events], abs=2e-6), tag
