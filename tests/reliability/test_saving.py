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
from d9d_lightning.strategy.directories import remove_directory, replace_directory
from d9d_lightning.strategy.sharded import read_sharded


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


def save_often(folder: str, rank: int, seconds: float, kept: int, sharded: bool) -> None:
    keep = ModelCheckpoint(folder, every_n_train_steps=1, monitor="step", mode="max", save_top_k=kept, save_last=True)
    train(batches=400, callbacks=[KillSoon(rank, seconds), keep], save_distributed_checkpoint=sharded)


def read_steps(path: Path) -> int:
    """Number of steps in a checkpoint, all of whose tensors are read; raises if anything is missing or cut short."""
    checkpoint = read_sharded(path, False) if path.is_dir() else torch.load(path, weights_only=False)
    assert {name.split(".")[0] for name in checkpoint["state_dict"]} == {"blocks", "head"}
    assert all(bool(tensor.isfinite().all()) for tensor in checkpoint["state_dict"].values())
    return int(checkpoint["global_step"])


def kill_and_read(folder: Path, rank: int, seconds: float, kept: int, sharded: bool) -> int:
    """Kill a rank while it saves after every step; the number of steps in the last checkpoint."""
    endings = run_ranks(save_often, 2, str(folder), rank, seconds, kept, sharded, limit_s=90.0)
    assert [ending.exit_code for ending in endings][rank] == -signal.SIGKILL
    assert [ending.exit_code for ending in endings][1 - rank] == 1, endings[1 - rank].text
    steps = sorted(read_steps(path) for path in folder.glob("*.ckpt") if path.name != "last.ckpt")
    last = read_steps(folder / "last.ckpt")
    assert steps[-1] >= 2 and last >= steps[-1] - 1
    assert len(steps) >= (steps[-1] if kept < 0 else kept), steps  # the previous ones survive
    return last


@pytest.mark.full
@pytest.mark.parametrize("sharded", [False, True], ids=["file", "directory"])
@pytest.mark.parametrize("seed", range(20))
def test_a_kill_at_any_moment_of_saving_leaves_every_checkpoint_readable(
    tmp_path: Path, seed: int, sharded: bool
) -> None:
    """A rank killed while it trains, saves or removes leaves the last checkpoint and those before it readable."""
    generator = random.Random(seed)
    rank, seconds = generator.randrange(2), generator.uniform(0.0, 0.4)
    assert kill_and_read(tmp_path, rank, seconds, 2 if seed % 2 else -1, sharded) >= 1


def test_a_directory_is_replaced_and_removed_in_one_step(tmp_path: Path) -> None:
    """A directory takes the place of another one or of a file whole, and nothing is left of the old one."""
    target, new = tmp_path / "last.ckpt", tmp_path / ".new"
    target.write_text("a file")
    for content in ("first", "second"):
        new.mkdir()
        (new / content).touch()
        replace_directory(new, target)
        assert [path.name for path in target.iterdir()] == [content]
        assert list(tmp_path.iterdir()) == [target]
    remove_directory(target)
    assert list(tmp_path.iterdir()) == []
