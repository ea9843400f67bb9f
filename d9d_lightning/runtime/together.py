"""What every rank of a pipeline does whole, such as a step in lockstep: it raises on all ranks if it raises on one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from d9d_lightning.runtime.agreement import Agreement
from d9d_lightning.runtime.executor import Monitor
from d9d_lightning.runtime.whereabouts import place_of_failure
from d9d_lightning.values import StepStatus

__all__ = ["run_together"]

Result = TypeVar("Result")


def run_together(call: Callable[[], Result], agreement: Agreement, monitor: Monitor | None) -> Result:
    """Result of ``call``; collective over the pipeline.

    Args:
        call: The same on every rank.
        agreement: Compares with the other ranks afterwards.
        monitor: Told of an error at once: the others may wait for something else of this rank, and end by that.

    Raises:
        RankFailedError: It raised on another rank.
        Exception: It raised here first.
    """
    try:
        result = call()
    except Exception as error:
        failed_at = time.time()
        if monitor is not None:
            monitor.report(error)
        _agree(agreement, error, failed_at)
        raise
    _agree(agreement, None, 0.0)
    return result


def _agree(agreement: Agreement, failure: Exception | None, failed_at: float) -> None:
    status, _ = agreement.after(StepStatus.FINE if failure is None else StepStatus.FAILED, [])
    if status is StepStatus.FAILED:
        where = "" if failure is None else place_of_failure("a step in lockstep", failure)
        agreement.raise_first(failure, where, failed_at)
