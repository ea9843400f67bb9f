"""A module and a callback that log from every hook in which Lightning allows it, in every way of ``self.log``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
import torchmetrics

from tests.strategy.strategy_cases import QUIET, Classifier, Losses, make_loader

STEP_HOOKS = (
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_start",
    "on_train_batch_end",
    "on_validation_batch_start",
    "on_validation_batch_end",
    "on_test_batch_start",
    "on_test_batch_end",
)
EPOCH_HOOKS = (
    "on_train_start",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_validation_start",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
    "on_test_start",
    "on_test_epoch_start",
    "on_test_epoch_end",
)


def make_hook(name: str, source: str, reduce_fx: Any) -> Callable[..., None]:
    """A hook that logs how often it was called, plus a tenth of the epoch."""

    def hook(self: Any, *args: Any, **kwargs: Any) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        value = self.calls[name] + 0.1 * self.epoch()
        options = {"on_step": True, "on_epoch": True} if name in STEP_HOOKS else {}
        self.log(f"{source}/{name}", value, reduce_fx=reduce_fx, batch_size=self.calls[name], **options)

    hook.__name__ = name
    return hook


class Chatty(L.Callback):
    """A callback that logs from each of its hooks."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.trainer: Any = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.trainer = trainer

    def epoch(self) -> int:
        return self.trainer.current_epoch


class LogsEverywhere(Classifier):
    """Logs from every hook of its own, and in a step with all reductions, sizes and kinds of metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}
        scores = {name: getattr(torchmetrics, name)("multiclass", num_classes=3) for name in ("Accuracy", "F1Score")}
        self.scores = torchmetrics.MetricCollection(dict(scores), prefix="train_")
        self.loader_scores = torch.nn.ModuleList([self.scores.clone(prefix=f"loader{n}_") for n in (0, 1)])

    def epoch(self) -> int:
        return self.trainer.current_epoch

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss, logits = self.loss_of(batch)
        self.log("smallest", logits.min(), reduce_fx="min", on_step=True, on_epoch=True)
        self.log("callable", logits.max(), reduce_fx=torch.max, on_step=True, on_epoch=True)
        self.log("tokens", loss, batch_size=len(logits), on_step=True, on_epoch=True)
        self.scores(logits, batch[1])
        self.log_dict(self.scores, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss, logits = self.loss_of(batch)
        self.loader_scores[dataloader_idx].update(logits, batch[1])
        self.log_dict(self.loader_scores[dataloader_idx], add_dataloader_idx=False)
        self.log(f"of_loader_{dataloader_idx}", loss, add_dataloader_idx=False, batch_size=len(logits))
        self.log("suffixed", loss, batch_size=len(logits))
        return loss

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        loss, _ = self.loss_of(batch)
        self.log("test_loss", loss, on_step=True, on_epoch=True, reduce_fx="min")
        return loss


for _name in (*STEP_HOOKS, *EPOCH_HOOKS):
    setattr(LogsEverywhere, _name, make_hook(_name, "module", "mean"))
    setattr(Chatty, _name, make_hook(_name, "callback", "max"))


def log_everywhere(strategy: Any, devices: int) -> dict[str, Any]:
    """Fit and test; all metrics after each batch and at both ends, for callbacks and for loggers."""
    L.seed_everything(7, verbose=False)
    module, seen = LogsEverywhere(), Losses()
    trainer = L.Trainer(strategy=strategy, devices=devices, max_epochs=2, callbacks=[Chatty(), seen], **QUIET)
    trainer.fit(module, make_loader(), [make_loader(10, 5), make_loader(8, 5)])
    fitted = [dict(trainer.callback_metrics), dict(trainer.logged_metrics)]
    tested = trainer.test(module, make_loader(11, 4), verbose=False)
    found = [*fitted, *tested, dict(trainer.logged_metrics)]
    return {"batches": seen.metrics, "ends": [{key: float(one[key]) for key in sorted(one)} for one in found]}
