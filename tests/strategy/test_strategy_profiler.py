"""Periodic traces through Lightning: as ``Trainer(profiler=...)`` and as a callback."""

from __future__ import annotations

import json
import tarfile
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from d9d_lightning.errors import PipelineConfigurationError
from d9d_lightning.strategy import PeriodicTraces, PipelineProfiler
from d9d_lightning.testing import run_distributed
from tests.strategy.strategy_cases import QUIET, fit, make_loader, pipeline


def written(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def names_in(path: Path) -> set[str]:
    with tarfile.open(path) as archive:
        (member,) = archive.getmembers()
        events = json.load(archive.extractfile(member))["traceEvents"]  # type: ignore[arg-type]
    return {event.get("name", "") for event in events}


def use(kind: str, traces: Any) -> dict[str, Any]:
    return {"profiler": traces} if kind == "profiler" else {"callbacks": [traces]}


def make(kind: str, *arguments: Any, **options: Any) -> Any:
    return (PipelineProfiler if kind == "profiler" else PeriodicTraces)(*arguments, **options)


@pytest.mark.parametrize("kind", ["profiler", "callback"])
def test_a_fit_writes_one_trace_a_period(tmp_path: Path, kind: str) -> None:
    """8 batches with period 4 give two traces, named after the steps done; a second fit with it writes again."""
    traces = make(kind, tmp_path, 4, 1, 1)
    fit(pipeline(), max_epochs=2, **use(kind, traces))
    assert written(tmp_path) == ["step_4/rank-0-coord-0-0-0-trace.tar.gz", "step_8/rank-0-coord-0-0-0-trace.tar.gz"]
    names = names_in(tmp_path / "step_4" / "rank-0-coord-0-0-0-trace.tar.gz")
    assert "ProfilerStep#3" in names and "aten::addmm" in names
    assert ("run_training_batch" in names) == (kind == "profiler")


@pytest.mark.parametrize("kind", ["profiler", "callback"])
def test_accumulated_batches_are_one_step(tmp_path: Path, kind: str) -> None:
    """A step is an optimizer step: 8 batches accumulated two by two are 4, numbered as ``global_step``."""
    fit(pipeline(), max_epochs=2, accumulate_grad_batches=2, **use(kind, make(kind, tmp_path, 2, 0, 1)))
    assert [name.split("/")[0] for name in written(tmp_path)] == ["step_2", "step_4"]


@pytest.mark.parametrize("kind", ["profiler", "callback"])
def test_numbering_continues_after_resume(tmp_path: Path, kind: str) -> None:
    """A fit resumed from a checkpoint at step 4 writes the window that ends at step 8, not another at 4."""
    _, trainer, _ = fit(pipeline(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    traces = make(kind, tmp_path / "traces", 8, 0, 2)
    fit(pipeline(), max_epochs=2, ckpt=tmp_path / "one.ckpt", **use(kind, traces))
    (path,) = (tmp_path / "traces").rglob("*.tar.gz")
    assert path.parent.name == "step_8"
    assert {"ProfilerStep#6", "ProfilerStep#7"} <= names_in(path)


@pytest.mark.parametrize("kind", ["profiler", "callback"])
def test_an_error_in_training_comes_out_and_earlier_traces_are_kept(tmp_path: Path, kind: str) -> None:
    """The step's own error ends the fit, what was recorded is on disk, and the profiler can be used again."""

    class Failing(L.Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                raise KeyError("mine")

    traces = make(kind, tmp_path, 2, 0, 1)
    options = use(kind, traces)
    options["callbacks"] = [*options.get("callbacks", []), Failing()]
    with pytest.raises(KeyError, match="mine"):
        fit(pipeline(), max_epochs=1, **options)
    assert [name.split("/")[0] for name in written(tmp_path)] == ["step_2"]
    fit(pipeline(), max_epochs=1, **use(kind, traces))
    assert [name.split("/")[0] for name in written(tmp_path)] == ["step_2", "step_4"]


@pytest.mark.parametrize("kind", ["profiler", "callback"])
def test_wrong_steps_are_told_where_they_are_typed(kind: str) -> None:
    """A period that cannot hold its windows is an error when the profiler is made."""
    with pytest.raises(PipelineConfigurationError, match="period_steps >="):
        make(kind, period_steps=2, warmup_steps=2, active_steps=1)


@pytest.mark.parametrize("kind", ["profiler", "callback"])
def test_without_a_folder_traces_are_in_the_log_directory(tmp_path: Path, kind: str) -> None:
    """``traces`` under the Trainer's directory, and any strategy of Lightning may be traced."""
    fit("auto", max_epochs=1, default_root_dir=tmp_path, **use(kind, make(kind, None, 4, 0, 1)))
    assert written(tmp_path) == ["traces/step_4/trace.tar.gz"]


def test_only_training_is_traced(tmp_path: Path) -> None:
    """Validate, test and predict with the profiler write nothing and do not open it."""
    traces = PipelineProfiler(tmp_path, 1, 0, 1)
    module, _, _ = fit(pipeline(), max_epochs=1)
    L.Trainer(strategy=pipeline(), profiler=traces, devices=1, **QUIET).validate(module, make_loader(), verbose=False)
    assert written(tmp_path) == []


def fit_traced(folder: str, kind: str) -> list[float]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit(pipeline(), devices=2, max_epochs=1, **use(kind, make(kind, folder, 4, 1, 1)))[2].losses


def test_every_rank_writes_under_its_coordinates(tmp_path: Path) -> None:
    """Two processes write a file each, named by rank and mesh coordinates, and train as without."""
    for kind in ("profiler", "callback"):
        first, second = run_distributed(fit_traced, 2, (str(tmp_path / kind), kind), init_group=False)
        assert written(tmp_path / kind) == [
            "step_4/rank-0-coord-0-0-0-trace.tar.gz",
            "step_4/rank-1-coord-1-0-0-trace.tar.gz",
        ]
        assert first == second == pytest.approx(fit("auto", max_epochs=1)[2].losses, abs=2e-6)
