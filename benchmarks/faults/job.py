"""A small training job that a :class:`benchmarks.faults.fault.Fault` strikes at one of its places."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from benchmarks.faults.fault import BLOCKS, LOOPS, MESSAGE, BadLabelError, Fault, Trigger
from d9d_lightning import D9DStrategy

__all__ = ["MESSAGE", "BadLabelError", "Fault", "Job", "run_in", "run_loop", "train"]


class _Reach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, trigger: Trigger, block: int) -> Tensor:
        ctx.trigger, ctx.block = trigger, block
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.trigger.reach("backward", ctx.block)
        return grads[0], None, None


class Block(nn.Module):
    """A residual layer that may fail in either pass."""

    def __init__(self, index: int, trigger: Trigger) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.index = index
        self.trigger = [trigger]

    def forward(self, x: Tensor) -> Tensor:
        trigger = self.trigger[0]
        if x.device.type != "meta" and trigger.batch >= 0:
            trigger.reach("forward", self.index)
        return x + torch.tanh(self.linear(_Reach.apply(x, trigger, self.index)))


class Job(L.LightningModule):
    """A classifier with a trigger at every place.

    Args:
        trigger: Told of every place.
        reads: Whether evaluation steps read an activation, and so run in lockstep.
    """

    def __init__(self, trigger: Trigger, reads: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(index, trigger) for index in range(BLOCKS))
        self.head = nn.Linear(8, 3)
        self._trigger = [trigger]
        self._reads = reads

    def setup(self, stage: str) -> None:
        self._trigger[0].reach("setup")

    def configure_model(self) -> None:
        self._trigger[0].reach("configure_model")

    def configure_optimizers(self) -> Any:
        self._trigger[0].reach("configure_optimizers")
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_fit_start(self) -> None:
        self._trigger[0].reach("on_fit_start")

    def on_train_start(self) -> None:
        self._trigger[0].reach("on_train_start")

    def on_train_epoch_end(self) -> None:
        self._trigger[0].reach("on_train_epoch_end")

    def on_train_end(self) -> None:
        self._trigger[0].reach("on_train_end")

    def on_validation_epoch_end(self) -> None:
        self._trigger[0].reach("epoch end")

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self._trigger[0].reach("on_save_checkpoint")
        checkpoint["written"] = Written(self._trigger[0])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._trigger[0].begin("train", batch_idx)

    def on_validation_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._trigger[0].begin("validation", batch_idx)

    def on_test_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._trigger[0].begin("test", batch_idx)

    def on_predict_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._trigger[0].begin("predict", batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, labels = batch
        self._trigger[0].reach("step")
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x), labels)
        self._trigger[0].reach("loss")
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._evaluate(batch))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", self._evaluate(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._evaluate(batch)

    def _evaluate(self, batch: Any) -> Tensor:
        x, labels = batch
        self._trigger[0].reach("step")
        for block in self.blocks:
            x = block(x)
            if self._reads and x.abs().max() > 1e6:
                break
        loss = F.cross_entropy(self.head(x), labels)
        self._trigger[0].reach("loss")
        return loss


class Written:
    """Part of a checkpoint, and reached while the file is written."""

    def __init__(self, trigger: Trigger) -> None:
        self._trigger = trigger

    def __reduce__(self) -> Any:
        self._trigger.reach("file")
        return (OrderedDict, ())


class Records(Logger):
    """A logger of the user."""

    name = version = "records"

    def __init__(self, trigger: Trigger) -> None:
        super().__init__()
        self._trigger = trigger

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self._trigger.reach("logger")

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Not kept."""


class Reaching(L.Callback):
    """A callback of the user."""

    def __init__(self, trigger: Trigger) -> None:
        self._trigger = trigger
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self._trigger.reach("callback")

    def on_validation_batch_end(self, *args: Any) -> None:
        self._trigger.reach("callback")

    def on_test_batch_end(self, *args: Any) -> None:
        self._trigger.reach("callback")

    def on_predict_batch_end(self, *args: Any) -> None:
        self._trigger.reach("callback")


class Samples(Dataset[tuple[Tensor, int]]):
    """Random features; reading one may fail. The loader is one batch ahead of the training."""

    def __init__(self, trigger: Trigger, count: int, loop: str) -> None:
        self._trigger = trigger
        self._loop = loop
        self._features = torch.randn(count, 8, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self._features)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self._trigger.reach("loader", loop=self._loop)
        return self._features[index], index % 3


def train(
    fault: Fault | None = None,
    *,
    schedule: str = "zbv",
    batches: int = 6,
    callbacks: list[Any] | None = None,
    ranks: int = 2,
    nodes: int = 1,
    trainer: dict[str, Any] | None = None,
    **strategy: Any,
) -> list[float]:
    """Fit the job on this process, one of several.

    Args:
        fault: What goes wrong.
        schedule: Name of the schedule.
        batches: Number of batches.
        callbacks: Further callbacks.
        ranks: Number of processes on this host.
        nodes: Number of hosts.
        trainer: Further arguments of ``Trainer``.
        strategy: Further arguments of :func:`run_loop` or of ``D9DStrategy``.

    Returns:
        The loss of every batch.
    """
    return run_loop("fit", fault, schedule, batches, callbacks, ranks, nodes, trainer=trainer, **strategy)


def run_loop(
    method: str,
    fault: Fault | None = None,
    schedule: str = "zbv",
    batches: int = 6,
    callbacks: list[Any] | None = None,
    ranks: int = 2,
    nodes: int = 1,
    *,
    evaluate: bool = False,
    reads: bool = False,
    log: bool = False,
    trainer: dict[str, Any] | None = None,
    **strategy: Any,
) -> list[float]:
    """Run one method of a trainer on this process, one of several.

    Args:
        method: One of LOOPS.
        fault: As for :func:`train`, and so are the arguments that are not named here.
        schedule: Name of the schedule.
        batches: Number of batches.
        callbacks: Further callbacks.
        ranks: Number of processes on this host.
        nodes: Number of hosts.
        evaluate: Whether a fit has two batches of validation after its epoch.
        reads: Whether evaluation steps read an activation, and so run in lockstep.
        log: Whether there is a logger.
        trainer: Further arguments of ``Trainer``.
        strategy: Further arguments of ``D9DStrategy``.

    Returns:
        The loss of every training batch.
    """
    L.seed_everything(7, verbose=False)
    trigger = Trigger(fault, int(os.environ["RANK"]))
    reaching = Reaching(trigger)
    arguments: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": ranks,
        "num_nodes": nodes,
        "strategy": D9DStrategy(schedule, num_microbatches=4, **strategy),
        "max_epochs": 1,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "logger": Records(trigger) if log else False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": bool(callbacks),
        "callbacks": [reaching, *(callbacks or [])],
    }
    run = getattr(L.Trainer(**(arguments | (trainer or {}))), method)
    loader = DataLoader(Samples(trigger, 8 * batches, LOOPS[method]), batch_size=8)
    if method == "fit":
        run(
            Job(trigger, reads),
            loader,
            DataLoader(Samples(trigger, 16, "validation"), batch_size=8) if evaluate else None,
        )
    else:
        run(Job(trigger, reads), loader)
    return reaching.losses


def run_in(folder: str, method: str, fault: Fault, options: Mapping[str, Any]) -> None:
    """Run one method of a trainer in a folder.

    Args:
        folder: Becomes the working directory.
        method: One of LOOPS.
        fault: What goes wrong.
        options: Further arguments of :func:`run_loop`; ``save``: whether checkpoints are written to the folder.
    """
    os.chdir(folder)
    rest = {name: value for name, value in options.items() if name != "save"}
    keep = (
        [ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=1, save_last=True)] if options.get("save") else None
    )
    run_loop(method, fault, callbacks=keep, **rest)
