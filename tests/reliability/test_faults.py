"""Real fits of two processes that go wrong: every rank ends within seconds, and shows the true first error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from benchmarks.faults.job import MESSAGE, BadLabelError, Fault, train
from benchmarks.faults.ranks import Ending, run_ranks
from d9d_lightning.errors import RankFailedError
from d9d_lightning.testing import run_distributed

pytestmark = pytest.mark.timeout(120)

LIMIT_S = 25.0
"""Far above the seconds that are promised, since tests share a loaded machine; reached only by a hang."""


def end(fault: Fault, **options: Any) -> list[Ending]:
    """How the ranks of a job with this fault end; none of them may hang."""
    endings = run_ranks(train, 2, fault, **options)
    assert all(ending.exit_code is not None for ending in endings), [ending.text[-3000:] for ending in endings]
    assert all(ending.seconds < LIMIT_S for ending in endings), [ending.seconds for ending in endings]
    return endings


ALONE = [
    Fault("raise", "hook", 1),
    Fault("raise", "loader", 0),
    pytest.param(Fault("raise", "callback", 1), marks=pytest.mark.full),
    pytest.param(Fault("raise", "hook", 0), marks=pytest.mark.full),
    pytest.param(Fault("raise", "loader", 1), marks=pytest.mark.full),
    pytest.param(Fault("raise", "callback", 0), marks=pytest.mark.full),
]


@pytest.mark.parametrize("fault", ALONE, ids=lambda fault: fault.name)
def test_an_exception_on_one_rank_ends_all_with_the_users_own_error_first(fault: Fault) -> None:
    """A hook, a loader or a callback that raises on one rank ends both, non-zero, its own error first on each."""
    for ending in end(fault):
        assert ending.exit_code == 1
        assert MESSAGE in ending.first_error, ending.text
        assert "BadLabelError" in ending.text


GONE = [
    Fault("kill", "forward", batch=0, block=1),  # within the first second of the run
    pytest.param(Fault("exit", "callback", 1), marks=pytest.mark.full),
    pytest.param(Fault("kill", "callback", 1), marks=pytest.mark.full),
    pytest.param(Fault("kill", "forward", block=3), marks=pytest.mark.full),
    pytest.param(Fault("exit", "callback", 0), marks=pytest.mark.full),
]


@pytest.mark.parametrize("fault", GONE, ids=lambda fault: fault.name)
def test_a_rank_that_is_gone_is_named_by_the_others(fault: Fault) -> None:
    """After SIGKILL, an out-of-memory kill or an ``os._exit`` the other rank ends by itself and says which one died."""
    endings = end(fault)
    assert {ending.exit_code for ending in endings} == {1, -9 if fault.kind == "kill" else 17}
    (survivor,) = [ending for ending in endings if ending.exit_code == 1]
    assert "failed first" in survivor.first_error and "is gone" in survivor.first_error, survivor.text


def test_a_rank_that_was_stopped_is_named_and_ended() -> None:
    """A rank under SIGSTOP is named by the other one, which ends, and it does not stay behind as an orphan."""
    first, second = end(Fault("stop", "hook", 1))
    assert first.exit_code == 1 and second.exit_code == -9
    assert "rank 1 failed first" in first.first_error and "was stopped (SIGSTOP)" in first.first_error


@pytest.mark.full
def test_a_callback_that_never_returns_is_named_with_its_line() -> None:
    """A rank that hangs in the user's own code outside of a step is named with file, line and function."""
    for ending in end(Fault("hang", "callback", 1), timeout=4.0):
        assert ending.exit_code == 1
        assert "meanwhile rank 1: outside of any action, in strike" in ending.first_error, ending.text
        assert "fault.py" in ending.first_error, ending.first_error


def test_a_unit_that_never_returns_is_named_with_its_action() -> None:
    """A rank that hangs inside a unit is named with its action and unit once ``timeout`` is over."""
    endings = end(Fault("hang", "forward", block=1), timeout=2.0)
    assert {ending.exit_code for ending in endings} == {1}
    assert any("0F0, unit blocks.1: no end after 2 s" in ending.text for ending in endings), endings[0].text


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.full)])
def test_ctrl_c_on_one_rank_ends_all(rank: int) -> None:
    """KeyboardInterrupt on one rank ends the other too, non-zero, and the other says why."""
    endings = end(Fault("interrupt", "step", rank))
    assert {ending.exit_code for ending in endings} == {1}
    assert "KeyboardInterrupt" in endings[1 - rank].text


class SaveOnException(L.Callback):
    """Saves a checkpoint when a run is interrupted, and prints where it stood."""

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint("interrupted.ckpt")
        print(f"{type(exception).__name__} at step {trainer.global_step}")


def train_in(folder: str, fault: Fault) -> None:
    os.chdir(folder)
    train(fault, batches=8, callbacks=[SaveOnException()])


@pytest.mark.parametrize("rank", [1, pytest.param(0, marks=pytest.mark.full)])
def test_sigterm_to_one_rank_stops_all_at_the_same_step_with_a_checkpoint(tmp_path: Path, rank: int) -> None:
    """SIGTERM in the middle of a step stops both ranks behind that step, and a callback can save there."""
    endings = run_ranks(train_in, 2, str(tmp_path), Fault("terminate", "step", rank))
    assert [ending.exit_code for ending in endings] == [143, 143], [ending.text for ending in endings]
    assert all("SIGTERMException at step 3" in ending.text for ending in endings), endings[0].text
    saved = torch.load(tmp_path / "interrupted.ckpt", weights_only=False)
    assert saved["global_step"] == 3
    assert {name.split(".")[0] for name in saved["state_dict"]} == {"blocks", "head"}


def fail_and_fit_again(place: str, rank: int | None, schedule: str, block: int) -> tuple[str, str, list[float]]:
    """Type and text of the error of a first fit, and the losses of a second one."""
    try:
        train(Fault("raise", place, rank, batch=1, block=block), schedule=schedule, batches=3)
    except Exception as error:
        caught = error
    else:
        raise AssertionError("the first fit did not fail")
    again = train(schedule=schedule, batches=3)
    return type(caught).__name__, f"{caught}{getattr(caught, '__notes__', '')}", again


AGAIN = [
    ("loss", None, "zbv", 0),
    ("forward", None, "1f1b", 1),
    pytest.param("backward", None, "zbv", 3, marks=pytest.mark.full),
    pytest.param("hook", None, "gpipe", 0, marks=pytest.mark.full),
    *[
        pytest.param(place, None, schedule, block, marks=pytest.mark.full)
        for place, block in (("loss", 0), ("forward", 0), ("forward", 5), ("backward", 1), ("backward", 5), ("step", 0))
        for schedule in ("zbv", "1f1b", "gpipe")
    ],
]


@pytest.mark.parametrize(("place", "rank", "schedule", "block"), AGAIN)
def test_a_new_fit_works_after_the_users_step_raised(place: str, rank: int | None, schedule: str, block: int) -> None:
    """Every rank raises the user's error, and a second fit in the same processes gives the losses of a fresh one."""
    outcomes = run_distributed(fail_and_fit_again, 2, (place, rank, schedule, block), init_group=False)
    kinds = {kind for kind, _, _ in outcomes}
    assert BadLabelError.__name__ in kinds and kinds <= {BadLabelError.__name__, RankFailedError.__name__}
    assert all(MESSAGE in text for _, text, _ in outcomes)
    if place in ("forward", "backward"):
        assert all("action" in text for _, text, _ in outcomes), outcomes
    if place == "forward":
        assert all(f"unit blocks.{block}" in text for _, text, _ in outcomes), outcomes
    (fresh, _) = run_distributed(train, 2, kwargs={"schedule": schedule, "batches": 3}, init_group=False)
    assert all(again == fresh for _, _, again in outcomes)
