"""A rank that is killed while it saves never takes an older checkpoint with it."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from benchmarks.faults.job import train
from benchmarks.faults.ranks import run_ranks


class KillSoon(L.Callback):
    """Ends one process some time after the first checkpoints, wherever it is then."""

    def __init__(self, rank: int, seconds: float) -> None:
        self._rank = rank
        self._seconds = seconds
        self._armed = False

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == self._rank and trainer.global_step >= 3 and not self._armed:
            self._armed = True
            timer = threading.Timer(self._seconds, os.kill, (os.getpid(), signal.SIGKILL))
            timer.daemon = True
            timer.start()


def save_often(folder: str, rank: int, seconds: float) -> None:
    keep = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1, save_last=True)
    train(batches=400, callbacks=[KillSoon(rank, seconds), keep])


def kill_and_read(folder: Path, rank: int, seconds: float) -> int:
    """Kill a rank while it saves after every step; the number of steps in the last checkpoint."""
    endings = run_ranks(save_often, 2, str(folder), rank, seconds, limit_s=90.0)
    assert [ending.exit_code for ending in endings][rank] == -signal.SIGKILL
    assert [ending.exit_code for ending in endings][1 - rank] == 1, endings[1 - rank].text
    steps = []
    for path in folder.glob("*.ckpt"):
        steps.append(torch.load(path, weights_only=False)["global_step"])  # raises if any of them is cut short
    last = torch.load(folder / "last.ckpt", weights_only=False)["global_step"]
    assert max(steps) >= 2 and last >= max(steps) - 1
    return int(last)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(20))
def test_a_kill_at_any_moment_of_saving_leaves_every_checkpoint_readable(tmp_path: Path, seed: int) -> None:
    """At random moments of training and saving, a killed rank leaves all files readable, the last one included."""
    generator = random.Random(seed)
    assert kill_and_read(tmp_path, generator.randrange(2), generator.uniform(0.0, 0.4)) >= 1
