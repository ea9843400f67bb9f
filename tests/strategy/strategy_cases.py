"""Small modules and a Trainer that says nothing, shared by the tests of the strategy."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from d9d_lightning import D9DStrategy

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}


class Classifier(L.LightningModule):
    """Logs in every way: step, epoch, both, sums, extremes, torchmetrics."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 3)
        )
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.validation_accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)

    def loss_of(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        features, labels = batch
        logits = self.net(features)
        return F.cross_entropy(logits, labels), logits

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss, logits = self.loss_of(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("worst", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("right", (logits.argmax(1) == batch[1]).sum().float(), on_epoch=True, on_step=False, reduce_fx="sum")
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, logits = self.loss_of(batch)
        self.validation_accuracy(logits, batch[1])
        self.log_dict({"val_loss": loss, "val_accuracy": self.validation_accuracy}, prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        loss, _ = self.loss_of(batch)
        self.log("test_loss", loss)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)}


def make_data(samples: int = 22) -> TensorDataset:
    """Separable enough to learn, uneven against every batch size used here."""
    generator = torch.Generator().manual_seed(3)
    features = torch.randn(samples, 4, generator=generator)
    return TensorDataset(features, (features @ torch.randn(4, 3, generator=generator)).argmax(1))


def make_loader(samples: int = 22, batch_size: int = 6, **options: Any) -> DataLoader:
    """A loader over :func:`make_data`."""
    return DataLoader(make_data(samples), batch_size=batch_size, **options)


class Losses(L.Callback):
    """Keeps what callbacks see after every batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.metrics: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self.metrics.append({key: float(value) for key, value in sorted(trainer.callback_metrics.items())})


def fit(strategy: Any, make: Any = None, *, loader: Any = None, val: Any = None, ckpt: Any = None, **options: Any):
    """Train the module that ``make()`` returns; gives it, its trainer and what callbacks saw."""
    L.seed_everything(7, verbose=False)
    module = (make or Classifier)()
    seen = Losses()
    settings = {**QUIET, "devices": 1, "max_epochs": 2, **options}
    settings["callbacks"] = [*settings.get("callbacks", []), seen]
    trainer = L.Trainer(strategy=strategy, **settings)
    trainer.fit(module, loader if loader is not None else make_loader(shuffle=True), val, ckpt_path=ckpt)
    return module, trainer, seen


def pipeline(**options: Any) -> D9DStrategy:
    """The strategy with three microbatches."""
    return D9DStrategy(**{"num_microbatches": 3, **options})


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Largest difference of any tensor, names compared first."""
    if set(one) != set(other):
        raise AssertionError(f"names differ: {sorted(set(one) ^ set(other))}")
    return max(float((one[key].double() - other[key].double()).abs().max()) for key in one if one[key].numel())
