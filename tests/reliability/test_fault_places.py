"""Faults outside of training batches: evaluation in both of its ways, setup, saving, logging, the end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults.job import MESSAGE, BadLabelError, Fault, run_in, train
from benchmarks.faults.ranks import Ending, run_ranks
from d9d_lightning.errors import RankFailedError
from d9d_lightning.testing import run_distributed

pytestmark = pytest.mark.timeout(200)

LIMIT_S = 40.0
"""Far above the seconds that are promised, since tests share a loaded machine; reached only by a hang."""


def end(folder: Path, method: str, fault: Fault, options: dict[str, Any]) -> list[Ending]:
    """How the ranks end: all by themselves or by the watch, none of them well, the true error first."""
    options = {"batches": 4, "timeout": 60.0, **options}
    endings = run_ranks(run_in, 2, str(folder), method, fault, options, limit_s=LIMIT_S + 30)
    assert all(ending.exit_code not in (None, 0) for ending in endings), [ending.text[-3000:] for ending in endings]
    assert all(ending.seconds < LIMIT_S for ending in endings), [ending.seconds for ending in endings]
    shown = [ending.first_error for ending in endings if ending.first_error]
    assert shown and all(fault.told in line for line in shown), [ending.text[-3000:] for ending in endings]
    return endings


def in_evaluation(method: str, loop: str, reads: bool) -> list[Any]:
    options = {"reads": reads, "evaluate": method == "fit"}
    faults = [
        Fault("raise", "step", 1, 0, loop=loop),
        Fault("raise", "step", 0, 1, loop=loop),
        Fault("raise", "forward", None, 1, 1, loop),
        Fault("raise", "loss", 0, 1, loop=loop),
        Fault("raise", "hook", 1, 1, loop=loop),
        Fault("raise", "callback", 0, 1, loop=loop),
        Fault("raise", "loader", 1, None, loop=loop),
        Fault("kill", "forward", None, 1, 5, loop),
        Fault("stop", "hook", 0 if reads else 1, 1, loop=loop),
    ]
    return [pytest.param(method, fault, options, marks=pytest.mark.full) for fault in faults]


SANITY = {"evaluate": True, "trainer": {"num_sanity_val_steps": 1}}
PLACES: list[Any] = [
    (
        "fit",
        Fault("raise", "step", 1, 0, loop="validation"),
        {"evaluate": True, "trainer": {"num_sanity_val_steps": 1}},
    ),
    ("fit", Fault("raise", "on_train_end", 1, None), {}),
    *[
        pytest.param("fit", Fault("raise", place, rank, None), {}, marks=pytest.mark.full)
        for place in ("setup", "configure_model", "configure_optimizers", "on_fit_start", "on_train_start")
        for rank in (0, 1)
    ],
    *[
        pytest.param("fit", fault, {"save": True, "save_distributed_checkpoint": sharded}, marks=pytest.mark.full)
        for sharded in (False, True)
        for fault in (
            Fault("raise", "on_save_checkpoint", 0, None),
            Fault("raise", "on_save_checkpoint", 1, None),
            Fault("kill", "on_save_checkpoint", 1, None),
            Fault("stop", "on_save_checkpoint", 1, None),
            Fault("raise", "file", 0, None),
            Fault("kill", "file", 0, None),
        )
    ],
    *[
        pytest.param("fit", fault, options, marks=pytest.mark.full)
        for fault, options in (
            (Fault("raise", "logger", 0, None), {"log": True}),
            (Fault("raise", "logger", 1, None), {"log": True}),
            (Fault("raise", "on_train_epoch_end", 1, None), {}),
            (Fault("raise", "on_train_end", 0, None), {}),
            (Fault("stop", "on_train_end", 1, None), {}),
            (Fault("kill", "on_train_end", 0, None), {}),
            (Fault("kill", "setup", 1, None), {}),
            (Fault("kill", "configure_optimizers", 0, None), {}),
        )
    ],
    *[
        case
        for method, loop in (("fit", "validation"), ("test", "test"), ("predict", "predict"))
        for reads in (False, True)
        for case in in_evaluation(method, loop, reads)
    ],
]


@pytest.mark.parametrize(("method", "fault", "options"), PLACES, ids=str)
def test_a_fault_outside_of_training_batches_ends_all_with_the_true_error_first(
    tmp_path: Path, method: str, fault: Fault, options: dict[str, Any]
) -> None:
    """Evaluation as a pipeline or in lockstep, setup, saving, logging and the end of a run fail as training does."""
    end(tmp_path, method, fault, options)


def fail_and_fit_again(fault: Fault, options: dict[str, Any]) -> tuple[str, str, list[float]]:
    """Type and text of the error of a fit whose validation fails, and the losses of a second one."""
    try:
        train(fault, evaluate=True, batches=4, **options)
    except Exception as error:
        caught = error
    else:
        raise AssertionError("the first fit did not fail")
    return type(caught).__name__, str(caught), train(evaluate=True, batches=4, **options)


REPLICAS = {"ranks": 4, "data_parallel_size": 2}
AGAIN = [
    (Fault("raise", "forward", None, 0, 5, "validation", (1, 3)), {"reads": True, **REPLICAS}),
    *[
        pytest.param(fault, {"reads": reads, **replicas}, marks=pytest.mark.full)
        for reads in (False, True)
        for replicas in ({}, REPLICAS)
        for fault in (
            Fault("raise", "forward", None, 0, 1, "validation", (0, 2)),
            Fault("raise", "forward", None, 0, 5, "validation", (0, 2, 1)),
            Fault("raise", "loss", None, 0, loop="validation"),
        )
    ],
]


@pytest.mark.parametrize(("fault", "options"), AGAIN, ids=str)
def test_a_new_fit_works_after_a_failed_validation(fault: Fault, options: dict[str, Any]) -> None:
    """Every rank of every replica raises, and a second fit in the same processes gives the losses of a fresh one."""
    ranks = options.get("ranks", 2)
    outcomes = run_distributed(fail_and_fit_again, ranks, (fault, options), init_group=False, timeout=90.0)
    kinds = {kind for kind, _, _ in outcomes}
    assert BadLabelError.__name__ in kinds and kinds <= {BadLabelError.__name__, RankFailedError.__name__}
    assert all(MESSAGE in text for _, text, _ in outcomes)
    arguments = {"evaluate": True, "batches": 4, **options}
    fresh = run_distributed(train, ranks, kwargs=arguments, init_group=False, timeout=90.0)
    assert [again for _, _, again in outcomes] == fresh
