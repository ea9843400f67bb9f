"""Ways into a pipeline: scripts, workers, torchrun, the command line, one trainer after another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import lightning as L
import pytest
import torch

from d9d_lightning import D9DStrategy
from d9d_lightning.testing.ports import find_free_port
from tests.strategy.strategy_cases import QUIET, Classifier, fit, largest_difference, make_loader, pipeline

HERE = Path(__file__).parents[2]
LONG = 300

SCRIPT = """
import os
import sys
sys.path.insert(0, {here!r})
import lightning as L
from tests.strategy.strategy_cases import QUIET, Classifier, fit, make_loader, pipeline

def print(*values, flush=True):
    # two processes write to one pipe: one write a line keeps the lines apart
    os.write(1, (" ".join(map(str, values)) + "\\n").encode())

{body}
"""


def run_script(folder: Path, body: str, *, module: str | None = None, environment: dict[str, str] | None = None):
    script = folder / "script.py"
    script.write_text(SCRIPT.format(here=str(HERE), body=body))
    clean = {k: v for k, v in os.environ.items() if k not in ("LOCAL_RANK", "WORLD_SIZE", "RANK", "MASTER_PORT")}
    command = [sys.executable, *(module.split() if module else []), str(script)]
    return subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
        env={**clean, "OMP_NUM_THREADS": "1", **(environment or {})},
    )


TRAIN_AND_SAVE = """
module, trainer, seen = fit(pipeline(), devices=2)
trainer.save_checkpoint("end.ckpt")
print("RESULT", trainer.global_rank, trainer.world_size, trainer.global_step, flush=True)
"""


def results(done) -> list[str]:
    assert done.returncode == 0, done.stderr[-4000:]
    return sorted(line for line in done.stdout.splitlines() if line.startswith("RESULT"))


def assert_equals_one_device(path: Path) -> None:
    plain, _, _ = fit("auto")
    assert largest_difference(torch.load(path, weights_only=True)["state_dict"], plain.state_dict()) < 5e-6


@pytest.mark.parametrize("module", [None, "-m torch.distributed.run --nproc-per-node=2"], ids=["script", "torchrun"])
def test_a_script_starts_its_own_processes_or_runs_under_torchrun(tmp_path, module):
    """``python script.py`` with ``devices=2``, and the same script under torchrun, train on two processes."""
    done = run_script(tmp_path, TRAIN_AND_SAVE, module=module)
    assert results(done) == ["RESULT 0 2 8", "RESULT 1 2 8"]
    assert_equals_one_device(tmp_path / "end.ckpt")


def start_as_slurm_does(folder: Path, rank: int, port: int) -> subprocess.Popen[str]:
    """One of two tasks that ``srun --ntasks=2`` would start on a host."""
    variables = {
        "SLURM_JOB_ID": "12345",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, str(folder / "script.py")],
        cwd=folder,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_tasks_of_slurm_are_the_processes_of_the_pipeline(tmp_path):
    """Two tasks with the variables that ``srun`` sets train together, and neither starts further processes."""
    (tmp_path / "script.py").write_text(SCRIPT.format(here=str(HERE), body=TRAIN_AND_SAVE))
    port = find_free_port()
    tasks = [start_as_slurm_does(tmp_path, rank, port) for rank in (0, 1)]
    try:
        ended = [task.communicate(timeout=LONG) for task in tasks]
    finally:
        for task in tasks:
            task.kill()
    assert [task.returncode for task in tasks] == [0, 0], ended[0][1][-3000:]
    lines = [[line for line in out.splitlines() if line.startswith("RESULT")] for out, _ in ended]
    assert lines == [["RESULT 0 2 8"], ["RESULT 1 2 8"]]
    assert_equals_one_device(tmp_path / "end.ckpt")


SPAWN = """
if __name__ == "__main__":
    L.seed_everything(7, verbose=False)
    module = Classifier()
    trainer = L.Trainer(strategy=pipeline(start_method="{method}"), devices=2, max_epochs=2, **QUIET)
    trainer.fit(module, make_loader())
    import torch
    torch.save(module.state_dict(), "end.pt")
    print("RESULT", sorted(trainer.callback_metrics)[0], trainer.state.status.value, flush=True)
"""


@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.full), "fork"])
def test_workers_bring_the_whole_module_back(tmp_path, method):
    """After ``start_method="spawn"`` or ``"fork"`` the main process has the trained module, not the part of a rank."""
    done = run_script(tmp_path, SPAWN.format(method=method))
    assert results(done) == ["RESULT accuracy finished"]
    plain, _, _ = fit("auto", loader=make_loader())
    assert largest_difference(torch.load(tmp_path / "end.pt", weights_only=True), plain.state_dict()) < 5e-6


SEVERAL = """
for schedule, devices in (("zbv", 2), ("1f1b", 2)):
    module, trainer, seen = fit(pipeline(schedule=schedule), devices=devices, max_epochs=1)
    print("RESULT", schedule, trainer.global_rank, trainer.global_step, flush=True)
"""


def test_several_trainers_run_one_after_another(tmp_path):
    """A script may make one trainer after another, with other schedules, on the same processes."""
    done = run_script(tmp_path, SEVERAL)
    assert results(done) == [f"RESULT {name} {rank} 4" for name in ("1f1b", "zbv") for rank in (0, 1)]


CLI = """
from lightning.pytorch.cli import LightningCLI
class Data(L.LightningDataModule):
    def train_dataloader(self):
        return make_loader()
cli = LightningCLI(Classifier, Data)
strategy = cli.trainer.strategy
options = strategy.options
print("RESULT", type(strategy).__name__, options.schedule, options.num_microbatches, cli.trainer.global_step)
"""

YAML = """
seed_everything: 7
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  strategy:
    class_path: d9d_lightning.D9DStrategy
    init_args:
      schedule: 1f1b
      num_microbatches: 3
      activation_checkpointing: torch.nn.Linear
      timeout: 60
"""

NAMED = """
trainer:
  accelerator: cpu
  devices: 1
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  strategy: d9d_1f1b
"""


@pytest.mark.parametrize(("yaml", "microbatches"), [(YAML, 3), (NAMED, "auto")], ids=["class path", "registry name"])
def test_the_command_line_takes_the_strategy_from_a_file(tmp_path, yaml, microbatches):
    """LightningCLI builds the strategy from ``class_path`` and ``init_args`` in YAML, or from a registered name."""
    (tmp_path / "mine.yaml").write_text(yaml)
    script = tmp_path / "cli.py"
    script.write_text(SCRIPT.format(here=str(HERE), body=CLI))
    done = subprocess.run(
        [sys.executable, str(script), "fit", "--config", "mine.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert results(done) == [f"RESULT D9DStrategy 1f1b {microbatches} 4"]


def test_a_child_that_cannot_start_ends_everything(tmp_path):
    """A process that dies before all are connected ends the others, and its own message is shown."""
    body = 'import os\nif os.environ.get("LOCAL_RANK") == "1":\n    raise SystemExit("no disk")\n' + TRAIN_AND_SAVE
    done = run_script(tmp_path, body)
    assert done.returncode != 0
    assert "no disk" in done.stderr
    assert "local rank 1: exit code 1" in done.stderr


class ReadsMesh(Classifier):
    """Looks at the mesh where models are built."""

    def configure_model(self) -> None:
        self.axes = [
            self.device_mesh[name].size() for name in ("pipeline_parallel", "data_parallel", "tensor_parallel")
        ]


def test_the_mesh_is_there_in_configure_model_and_nothing_is_left_behind():
    """At one process the mesh can be read, no environment variable stays, and a plain trainer runs afterwards."""
    L.seed_everything(7, verbose=False)
    before = dict(os.environ)
    module, _, _ = fit(pipeline(pipeline_parallel_size=1), ReadsMesh, max_epochs=1)
    assert module.axes == [1, 1, 1]
    assert dict(os.environ) == before
    assert not torch.distributed.is_initialized()
    trainer = L.Trainer(devices=1, max_epochs=1, **QUIET)
    trainer.fit(Classifier(), make_loader())
    assert trainer.global_step == 4
    assert module.device_mesh is None
    assert repr(D9DStrategy()) == "<lightning.pytorch strategy D9DStrategy(schedule='zbv')>"
