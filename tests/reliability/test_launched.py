"""A script that starts its own processes leaves none of them behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

_SCRIPT = """
import os
import lightning as L
import torch
from d9d_lightning import D9DStrategy

class Endless(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))
    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 3:
            print(f"process {os.getpid()} trains", flush=True)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    L.seed_everything(1)
    trainer = L.Trainer(accelerator="cpu", devices=2, strategy=D9DStrategy("1f1b"), logger=False, max_epochs=10**6,
                        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    trainer.fit(Endless(), torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=8))
"""


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.mark.full
@pytest.mark.timeout(180)
def test_processes_end_when_the_one_that_started_them_is_killed(tmp_path: Path) -> None:
    """After SIGKILL of ``python script.py`` its child says that the parent, or rank 0, is gone, and ends."""
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, str(script)]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, **pipe) as parent:  # type: ignore[call-overload]
        found: set[int] = set()
        while len(found) < 2:
            line = parent.stdout.readline()
            assert line, "the script ended by itself"
            found |= {int(pid) for pid in re.findall(r"process (\d+) trains", line)}
        (child,) = found - {parent.pid}
        parent.kill()
        text = parent.stdout.read()  # ends when the child has ended too
    deadline = time.monotonic() + 10.0
    while is_running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(child)
    assert re.search(r"is gone", text), text
