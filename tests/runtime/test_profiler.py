"""The periodic profiler: which steps it records, how it names files, and what it must not do to training."""

from __future__ import annotations

import json
import tarfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity

from d9d_lightning.errors import PipelineConfigurationError
from d9d_lightning.runtime import profiler as profiler_module
from d9d_lightning.runtime import trace_writer
from d9d_lightning.runtime.profiler import Profiler


def train(profiler: Profiler, steps: int, start_step: int = 0) -> None:
    with profiler.open(start_step) as running:
        for _ in range(steps):
            torch.ones(4, 4) @ torch.ones(4, 4)
            running.step()


def written(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def events_of(path: Path) -> list[dict]:
    with tarfile.open(path) as archive:
        (member,) = archive.getmembers()
        return json.load(archive.extractfile(member))["traceEvents"]


def steps_in(path: Path) -> list[int]:
    names = {event.get("name", "") for event in events_of(path)}
    return sorted(int(name.split("#")[1]) for name in names if name.startswith("ProfilerStep#"))


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Pretend to be one process of many."""
    here = SimpleNamespace(rank=5)
    monkeypatch.setattr(profiler_module, "_is_distributed", lambda: True)
    monkeypatch.setattr(profiler_module, "_global_rank", lambda: here.rank)
    return here


@pytest.mark.parametrize("steps, folders", [(3, []), (4, ["step_4"]), (7, ["step_4"]), (8, ["step_4", "step_8"])])
def test_one_trace_a_period(tmp_path: Path, steps: int, folders: list[str]) -> None:
    """With period 4, warmup 1 and active 1, only whole windows are written, named after the steps done."""
    train(Profiler(tmp_path, 4, 1, 1), steps)
    assert written(tmp_path) == [f"{folder}/trace.tar.gz" for folder in folders]


def test_keyword_names_of_the_seed(tmp_path: Path) -> None:
    """The constructor takes the names that users of the original class write."""
    profiler = Profiler(save_dir=tmp_path, period_steps=2, warmup_steps=0, active_steps=2, dist_context=None)
    train(profiler, 2)
    assert steps_in(tmp_path / "step_2" / "trace.tar.gz") == [0, 1]


def test_the_archive_holds_one_trace_and_nothing_else_is_left(tmp_path: Path) -> None:
    """The JSON file is inside the archive, named like it, and not beside it."""
    train(Profiler(tmp_path, 1, 0, 1), 1)
    assert [path.name for path in (tmp_path / "step_1").iterdir()] == ["trace.tar.gz"]
    with tarfile.open(tmp_path / "step_1" / "trace.tar.gz") as archive:
        assert archive.getnames() == ["trace.json"]
    assert any(event.get("name") == "aten::mm" for event in events_of(tmp_path / "step_1" / "trace.tar.gz"))


def test_files_are_named_by_mesh_coordinates(tmp_path: Path, process: SimpleNamespace) -> None:
    """Each rank's file carries its global rank and its coordinates on the mesh."""
    mesh = SimpleNamespace(get_coordinate=lambda: [1, 0, 2])
    train(Profiler(tmp_path, 1, 0, 1, mesh), 1)
    assert written(tmp_path) == ["step_1/rank-5-coord-1-0-2-trace.tar.gz"]


def test_files_are_named_by_rank_without_a_mesh(tmp_path: Path, process: SimpleNamespace) -> None:
    """Without a mesh, or outside of it, the rank alone keeps files apart."""
    for folder, mesh in (("a", None), ("b", SimpleNamespace(get_coordinate=lambda: None))):
        train(Profiler(tmp_path / folder, 1, 0, 1, mesh), 1)
        assert written(tmp_path / folder) == ["step_1/rank-5-trace.tar.gz"]


def test_only_chosen_ranks_write(tmp_path: Path, process: SimpleNamespace) -> None:
    """Not every rank has to write: others neither record nor leave a file."""
    for process.rank in (0, 1, 5):
        train(Profiler(tmp_path, 1, 0, 1, ranks=[0, 5]), 1)
    assert written(tmp_path) == ["step_1/rank-0-trace.tar.gz", "step_1/rank-5-trace.tar.gz"]


def test_numbering_continues_after_resume(tmp_path: Path) -> None:
    """A run resumed at step 2 writes the windows that end at 4 and 8, with the step numbers of the whole run."""
    train(Profiler(tmp_path, 4, 1, 1), 6, start_step=2)
    assert written(tmp_path) == ["step_4/trace.tar.gz", "step_8/trace.tar.gz"]
    assert steps_in(tmp_path / "step_8" / "trace.tar.gz") == [7]


@pytest.mark.parametrize("start, recorded", [(3, [3]), (4, [4, 5]), (5, [5])])
def test_first_partial_window_after_resume_is_not_lost(tmp_path: Path, start: int, recorded: list[int]) -> None:
    """A resume in the middle of a window, past its warmup, still records what is left of it."""
    period, active = (4, 1) if start == 3 else (6, 2)
    train(Profiler(tmp_path, period, 1, active), period - start, start_step=start)
    assert steps_in(tmp_path / f"step_{period}" / "trace.tar.gz") == recorded


def test_a_window_cut_off_by_the_end_keeps_its_whole_steps(tmp_path: Path) -> None:
    """If training ends after two of three active steps, these two are written."""
    train(Profiler(tmp_path, 4, 1, 3), 3)
    assert written(tmp_path) == ["step_3/trace.tar.gz"]
    assert {1, 2} <= set(steps_in(tmp_path / "step_3" / "trace.tar.gz"))


@pytest.mark.parametrize("steps", [(1, 1, 1), (0, 0, 1), (4, -1, 1), (4, 1, 0), (4, 2, 3), (-1, 0, 1)])
def test_negative_wait_is_refused_when_the_profiler_is_made(tmp_path: Path, steps: tuple[int, int, int]) -> None:
    """Steps that do not fit into the period are named at once, with the rule, not by an assertion when it opens."""
    with pytest.raises(PipelineConfigurationError, match="period_steps >="):
        Profiler(tmp_path, *steps)


def test_a_negative_start_is_refused(tmp_path: Path) -> None:
    """A start before step 0 is an error that says what to give."""
    with (
        pytest.raises(PipelineConfigurationError, match="global_step"),
        Profiler(tmp_path, 1, 0, 1).open(-1),
    ):
        pass


def test_activities_are_those_of_the_machine(tmp_path: Path) -> None:
    """No device is hard-coded: by default all that torch supports here, otherwise what was asked for."""
    with Profiler(tmp_path, 1, 0, 1).open(0) as running:
        assert set(running.activities) == set(torch.profiler.supported_activities())
    with Profiler(tmp_path, 1, 0, 1, activities=[ProfilerActivity.CPU]).open(0) as running:
        assert set(running.activities) == {ProfilerActivity.CPU}


@pytest.mark.parametrize("option, mark", [("record_shapes", "Input Dims"), ("with_stack", "Python id")])
def test_shapes_and_stacks_are_recorded_only_when_asked_for(tmp_path: Path, option: str, mark: str) -> None:
    """The slow extras are off by default and there when switched on."""
    for value in (False, True):
        folder = tmp_path / str(value)
        train(Profiler(folder, 1, 0, 1, **{option: value}), 1)
        found = any(mark in event.get("args", {}) for event in events_of(folder / "step_1" / "trace.tar.gz"))
        assert found == value


def test_memory_is_recorded_only_when_asked_for(tmp_path: Path) -> None:
    """Allocations are in the trace if, and only if, they were asked for."""
    for value in (False, True):
        folder = tmp_path / str(value)
        train(Profiler(folder, 1, 0, 1, profile_memory=value), 1)
        events = events_of(folder / "step_1" / "trace.tar.gz")
        assert any(event.get("name") == "[memory]" for event in events) == value
    with pytest.raises(PipelineConfigurationError, match="profile_all_threads"):
        Profiler(tmp_path, 1, 0, 1, profile_memory=True, profile_all_threads=True)


@pytest.mark.parametrize("all_threads", [True, False])
def test_background_threads_are_recorded(tmp_path: Path, all_threads: bool) -> None:
    """What threads started before the window do is in the trace, unless switched off."""
    begin, done = threading.Event(), threading.Event()

    def work() -> None:
        begin.wait(30)
        torch.ones(3).cos()
        done.set()

    thread = threading.Thread(target=work)
    thread.start()
    with Profiler(tmp_path, 1, 0, 1, profile_all_threads=all_threads).open(0) as running:
        begin.set()
        done.wait(30)
        running.step()
    thread.join()
    names = {event.get("name") for event in events_of(tmp_path / "step_1" / "trace.tar.gz")}
    assert ("aten::cos" in names) == all_threads


def test_traces_are_written_off_the_training_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on while a trace is being written, and leaving the context waits for it."""
    release, threads = threading.Event(), []
    original = trace_writer.write_archive

    def held_back(trace: object, path: Path) -> None:
        threads.append(threading.current_thread())
        release.wait(30)
        original(trace, path)

    monkeypatch.setattr(trace_writer, "write_archive", held_back)
    with Profiler(tmp_path, 2, 0, 1).open(0) as running:
        for _ in range(4):
            running.step()
        assert written(tmp_path) == []
        release.set()
    assert written(tmp_path) == ["step_2/trace.tar.gz", "step_4/trace.tar.gz"]
    assert threading.current_thread() not in threads


def test_windows_without_a_pause_between_them_stay_apart(tmp_path: Path) -> None:
    """Each of many windows that follow one another directly holds its own steps, though written later."""
    train(Profiler(tmp_path, 2, 0, 2), 12)
    for end in range(2, 13, 2):
        recorded = steps_in(tmp_path / f"step_{end}" / "trace.tar.gz")
        assert recorded == [end - 2, end - 1]


def test_a_trace_that_cannot_be_written_costs_a_warning(tmp_path: Path) -> None:
    """A full or read-only disk does not end the run; the path and the reason are named."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.warns(UserWarning, match=r"file.*was not written"):
        train(Profiler(blocked, 1, 0, 1), 1)


def test_an_error_in_training_comes_out_and_earlier_traces_are_kept(tmp_path: Path) -> None:
    """If a step raises, the error is the step's own, the profiler stops, and finished windows are on disk."""
    profiler = Profiler(tmp_path, 2, 0, 1)
    with pytest.raises(KeyError, match="mine"), profiler.open(0) as running:
        running.step()
        running.step()
        raise KeyError("mine")
    assert written(tmp_path) == ["step_2/trace.tar.gz"]
    train(profiler, 2)
