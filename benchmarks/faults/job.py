"""A small training job that goes wrong in one chosen way: what, where, on which rank, at which batch."""

from __future__ import annotations

import os
import random
import signal
import threading
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from benchmarks.faults.ranks import note_moment
from d9d_lightning import D9DStrategy

MESSAGE = "label 77 is out of range"
BLOCKS = 6
PLACES = ("step", "forward", "backward", "loss", "hook", "callback", "loader")
KINDS = ("raise", "kill", "exit", "stop", "interrupt", "terminate", "hang")
SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "interrupt": signal.SIGINT,
    "terminate": signal.SIGTERM,
}


class BadLabelError(ValueError):
    """What a user's own code raises."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, once.

    Attributes:
        kind: What happens, one of KINDS.
        place: In which code, one of PLACES.
        rank: On which process; None: on whichever comes there first. Units run on one rank each anyway.
        batch: In which batch.
        block: In which block of the network, for the places ``forward`` and ``backward``.
    """

    kind: str
    place: str
    rank: int | None = None
    batch: int = 2
    block: int = 1

    @property
    def name(self) -> str:
        """Short text for tables."""
        where = f"{self.place} of block {self.block}" if self.place in ("forward", "backward") else self.place
        return f"{self.kind} in {where}" + ("" if self.rank is None else f", rank {self.rank}")

    @property
    def told(self) -> str:
        """What the first error that is shown must say; empty where no error has to be shown."""
        return {
            "raise": MESSAGE,
            "kill": "is gone",
            "exit": "is gone",
            "stop": "was stopped (SIGSTOP)",
            "interrupt": "KeyboardInterrupt",
            "terminate": "",
            "hang": "meanwhile rank",
        }[self.kind]

    def strike(self) -> None:
        """Let it happen, here and now."""
        note_moment()
        if self.kind == "raise":
            raise BadLabelError(MESSAGE)
        if self.kind == "exit":
            os._exit(17)
        if self.kind == "hang":
            threading.Event().wait()
        os.kill(os.getpid(), SIGNALS[self.kind])
        if self.kind == "stop":
            # the process goes on a little before a signal to itself takes effect
            threading.Event().wait(0.2)

    @classmethod
    def draw(cls, generator: random.Random, ranks: int, batches: int) -> Fault:
        """A random one."""
        return cls(
            generator.choice(KINDS),
            generator.choice(PLACES),
            generator.choice(range(ranks)),
            generator.randrange(batches),
            generator.randrange(BLOCKS),
        )


class Trigger:
    """Strikes when the chosen place is reached in the chosen batch."""

    def __init__(self, fault: Fault | None, rank: int) -> None:
        self._fault = fault
        self._rank = rank
        self.batch = -1
        self.struck = False

    def reach(self, place: str, block: int | None = None) -> None:
        """The job has come to a place."""
        fault = self._fault
        if fault is None or self.struck or fault.place != place or self.batch != fault.batch:
            return
        if place in ("forward", "backward"):
            if fault.block != block:
                return
        elif fault.rank is not None and fault.rank != self._rank:
            return
        self.struck = True
        fault.strike()


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
    """A classifier with a trigger at every place."""

    def __init__(self, trigger: Trigger) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(index, trigger) for index in range(BLOCKS))
        self.head = nn.Linear(8, 3)
        self._trigger = [trigger]
        self.losses: list[float] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._trigger[0].batch = batch_idx
        self._trigger[0].reach("hook")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, labels = batch
        self._trigger[0].reach("step")
        for block in self.blocks:
            x = block(x)
        loss = F.cross_entropy(self.head(x), labels)
        self._trigger[0].reach("loss")
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Reaching(L.Callback):
    """A callback of the user."""

    def __init__(self, trigger: Trigger) -> None:
        self._trigger = trigger
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))
        self._trigger.reach("callback")


class Samples(Dataset[tuple[Tensor, int]]):
    """Random features; reading one may fail. The loader is one batch ahead of the training."""

    def __init__(self, trigger: Trigger, count: int) -> None:
        self._trigger = trigger
        self._features = torch.randn(count, 8, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self._features)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self._trigger.reach("loader")
        return self._features[index], index % 3


def train(
    fault: Fault | None = None,
    *,
    schedule: str = "zbv",
    batches: int = 6,
    callbacks: list[Any] | None = None,
    ranks: int = 2,
    nodes: int = 1,
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
        strategy: Further arguments of ``D9DStrategy``.

    Returns:
        The loss of every batch.
    """
    L.seed_everything(7, verbose=False)
    trigger = Trigger(fault, int(os.environ["RANK"]))
    reaching = Reaching(trigger)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=ranks,
        num_nodes=nodes,
        strategy=D9DStrategy(schedule, num_microbatches=4, **strategy),
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=bool(callbacks),
        callbacks=[reaching, *(callbacks or [])],
    )
    trainer.fit(Job(trigger), DataLoader(Samples(trigger, 8 * batches), batch_size=8))
    return reaching.losses
