"""What a rank holds is its share of the model, its gradients and its optimizer states."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from d9d_lightning.partition.placeholder import Placeholder
from d9d_lightning.testing import run_distributed
from tests.strategy.strategy_cases import Classifier, fit, pipeline

BLOCKS = 12
WIDTH = 64


class Deep(Classifier):
    """Equal blocks between a small first and a small last layer."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(BLOCKS)]
        self.net = nn.Sequential(nn.Linear(4, WIDTH), *blocks, nn.Linear(WIDTH, 3))


class Weighs(L.Callback):
    """Bytes of parameters, gradients and optimizer states when a batch has been trained."""

    def __init__(self) -> None:
        self.held = 0

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: torch.optim.Optimizer) -> None:
        own = [p for p in pl_module.parameters() if not isinstance(p, Placeholder)]
        gradients = [p.grad for p in own if p.grad is not None]
        states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
        self.held = sum(tensor.untyped_storage().nbytes() for tensor in [*own, *gradients, *states])


def weigh(devices: int) -> int:
    weighs = Weighs()
    fit(pipeline(schedule="1f1b") if devices > 1 else "auto", Deep, devices=devices, max_epochs=1, callbacks=[weighs])
    return weighs.held


def test_each_of_two_ranks_holds_about_half() -> None:
    """Parameters, gradients and AdamW states of each rank are below 55 % of one device's, and together all of them."""
    one = weigh(1)
    ranks = run_distributed(weigh, 2, (2,), init_group=False)
    assert max(ranks) < 0.55 * one
    assert sum(ranks) == one


@pytest.mark.full
def test_resident_memory_of_each_of_four_ranks_is_below_40_percent() -> None:
    """With 12 equal blocks the peak of each of four processes, and of saving, stays far below one device's."""
    script = Path(__file__).parents[2] / "benchmarks" / "memory" / "run.py"
    command = [sys.executable, str(script), "--width", "384"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = re.findall(r"\| 4 ranks.*peak (\d+)%, left (\d+)% \| (\d+)", done.stdout)
    assert len(rows) == 8, done.stdout
    # fixed costs of a process of some megabytes weigh more than in the benchmark's own size
    assert all(int(peak) < 40 and int(left) < 40 for peak, left, _ in rows), done.stdout
    parameters = int(re.search(r"states: (\d+) MB", done.stdout)[1]) / 4
    assert all(int(saving) <= parameters for *_, saving in rows), done.stdout


class RunsOut(Classifier):
    """Holds a megabyte of parameters, and needs more memory than there is after the first step."""

    def __init__(self) -> None:
        super().__init__(width=512)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.global_step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss


def test_the_states_of_adamw_are_in_the_error_that_memory_ran_out() -> None:
    """After a step of AdamW the error says that its states are twice as large as the parameters."""
    with pytest.raises(torch.OutOfMemoryError, match=r"held 1\.0 MB of parameters; .*; 2\.0 MB of optimizer states"):
        fit(pipeline(), RunsOut, max_epochs=2)
