"""A pipeline that fails beside others: its replicas cannot know from a status of its own."""

from __future__ import annotations

import pytest

from benchmarks.faults.job import MESSAGE, Fault, train
from benchmarks.faults.ranks import run_ranks


@pytest.mark.full
@pytest.mark.timeout(200)
@pytest.mark.parametrize("fault", [Fault("raise", "loss", rank=0), Fault("raise", "hook", rank=2)], ids=str)
def test_an_error_in_one_replica_ends_the_others_too(fault: Fault) -> None:
    """Two pipelines of two ranks: after an exception in one of them all four processes end with the user's error."""
    endings = run_ranks(train, 4, fault, schedule="1f1b", ranks=4, data_parallel_size=2, limit_s=90.0)
    assert [ending.exit_code for ending in endings] == [1, 1, 1, 1], [ending.text for ending in endings]
    assert all(MESSAGE in ending.first_error for ending in endings), [ending.text for ending in endings]
    assert all(ending.seconds < 40.0 for ending in endings)
