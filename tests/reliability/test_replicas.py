"""A pipeline that fails beside others: they raise with it, and all of them can be used again."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.faults.job import MESSAGE, BadLabelError, Fault, train
from benchmarks.faults.ranks import run_ranks
from d9d_lightning.errors import RankFailedError
from d9d_lightning.testing import run_distributed

pytestmark = pytest.mark.timeout(200)
BATCHES = 5
"""Of eight samples; each replica trains on two batches of eight and one of four, which needs a plan of its own."""
REPLICAS: dict[str, Any] = {"ranks": 4, "data_parallel_size": 2}


@pytest.mark.full
@pytest.mark.parametrize(
    "fault", [Fault("raise", "loss", rank=0), Fault("raise", "hook", rank=2), Fault("raise", "hook", rank=3)], ids=str
)
def test_an_error_in_one_replica_ends_the_others_too(fault: Fault) -> None:
    """Two pipelines of two ranks: after an exception in one of them all four processes end with the user's error."""
    endings = run_ranks(train, 4, fault, schedule="1f1b", limit_s=90.0, **REPLICAS)
    assert [ending.exit_code for ending in endings] == [1, 1, 1, 1], [ending.text for ending in endings]
    assert all(MESSAGE in ending.first_error for ending in endings), [ending.text for ending in endings]
    assert all(ending.seconds < 40.0 for ending in endings)


def fail_and_fit_again(fault: Fault, schedule: str, options: dict[str, Any]) -> tuple[str, str, list[float]]:
    """Type and text of the error of a first fit, and the losses of a second one."""
    try:
        train(fault, schedule=schedule, batches=BATCHES, **REPLICAS, **options)
    except Exception as error:
        caught = error
    else:
        raise AssertionError("the first fit did not fail")
    return type(caught).__name__, str(caught), train(schedule=schedule, batches=BATCHES, **REPLICAS, **options)


FIRST, SECOND = (0, 2), (1, 3)
"""Processes of each replica; ranks 0 and 1 own the loss."""

AGAIN = [
    (Fault("raise", "forward", batch=1, block=1, among=SECOND), "zbv", {}),
    *[
        pytest.param(
            Fault("raise", place, batch=1, block=block, among=among), schedule, options, marks=pytest.mark.full
        )
        for among in (FIRST, SECOND)
        for place, block, schedule, options in (
            ("forward", 1, "1f1b", {}),
            ("forward", 5, "zbv", {"bucket_size_mb": 0.0001}),
            ("backward", 1, "1f1b", {"bucket_size_mb": 0.0001}),
            ("backward", 5, "gpipe", {}),
        )
    ],
    pytest.param(Fault("raise", "loss", rank=0, batch=1), "zbv", {}, marks=pytest.mark.full),
    pytest.param(Fault("raise", "loss", rank=1, batch=0), "1f1b", {}, marks=pytest.mark.full),
]


@pytest.mark.parametrize(("fault", "schedule", "options"), AGAIN, ids=str)
def test_replicas_can_be_used_again_after_a_step_raised_on_any_rank(
    fault: Fault, schedule: str, options: dict[str, Any]
) -> None:
    """All ranks of both replicas raise, and a second fit in the same processes gives the losses of a fresh one."""
    outcomes = run_distributed(fail_and_fit_again, 4, (fault, schedule, options), init_group=False, timeout=90.0)
    kinds = [kind for kind, _, _ in outcomes]
    assert BadLabelError.__name__ in kinds and set(kinds) <= {BadLabelError.__name__, RankFailedError.__name__}
    assert all(MESSAGE in text for _, text, _ in outcomes)
    arguments: dict[str, Any] = {"schedule": schedule, "batches": BATCHES, **REPLICAS, **options}
    fresh = run_distributed(train, 4, kwargs=arguments, init_group=False, timeout=90.0)
    assert [again for _, _, again in outcomes] == fresh
