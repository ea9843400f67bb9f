"""Run a function once per rank, in real processes over gloo, from an ordinary pytest test.

    @distributed(ranks=2)
    def test_sum() -> None:
        value = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(value)
        assert value.item() == 1.0

Workers are kept between tests, with torch imported, so a test costs a fraction of a second. A rank that raises, hangs
or dies is reported in full, and the workers of that test are replaced.
"""

from __future__ import annotations

import functools
import inspect
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeVar

from d9d_lightning.errors import WorkerError
from d9d_lightning.testing.pool import Worker, return_workers, take_workers
from d9d_lightning.testing.ports import find_free_port
from d9d_lightning.testing.worker import Job, Report

__all__ = ["RankOutcome", "collect_outcomes", "distributed", "run_distributed"]

_GRACE_SECONDS = 10.0
_WAKE_SECONDS = 0.5
_STACK_SECONDS = 2.0
_OUTPUT_SHOWN = 6000

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


@dataclass(frozen=True)
class RankOutcome:
    """What one rank came to. Exactly one of ``value``, ``error``, ``skip``, ``exit_code`` and ``stack`` tells.

    Attributes:
        rank: The rank.
        value: What the function returned.
        error: Traceback of the exception that it raised, else None.
        error_type: Name of that exception's class.
        skip: Reason given to ``pytest.skip``, else None.
        exit_code: Exit code of the process if it ended by itself (negative: number of the signal), else None.
        stack: Stacks of all threads if the rank hung and was killed, else None.
        output: What the rank wrote to stdout and stderr.
        time: ``time.monotonic()`` of the end, comparable between ranks.
    """

    rank: int
    value: Any = None
    error: str | None = None
    error_type: str | None = None
    skip: str | None = None
    exit_code: int | None = None
    stack: str | None = None
    output: str = ""
    time: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether the rank raised, hung or died."""
        return self.error is not None or self.exit_code is not None or self.stack is not None


def distributed(
    ranks: int, timeout: float = 60.0, init_group: bool = True, fresh: bool = False
) -> Callable[[FunctionT], FunctionT]:
    """Make a module-level test function run once per rank, inside a gloo group of all ranks.

    Fixtures and parameters reach every rank by pickling, so ``tmp_path`` works and ``monkeypatch`` does not.

    Args:
        ranks: Number of processes.
        timeout: Seconds after which ranks still running are shown with their stacks and killed.
        init_group: Whether to initialise ``torch.distributed`` first. In either case the variables that torchrun sets
            (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``) are there.
        fresh: Whether to replace the workers afterwards, for tests that leave patches behind.

    Returns:
        The decorator.
    """

    def decorate(function: FunctionT) -> FunctionT:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True  # pytest then shows the ranks' tracebacks, not this file
            run_distributed(function, ranks, args, kwargs, timeout=timeout, init_group=init_group, fresh=fresh)

        run.runs_distributed = True  # type: ignore[attr-defined]
        return run  # type: ignore[return-value]

    return decorate


def run_distributed(
    function: Callable[..., Any],
    ranks: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout: float = 60.0,
    init_group: bool = True,
    fresh: bool = False,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call a module-level function once per rank and return what each rank returned, in rank order.

    Args:
        function: Module-level function; workers import it by name.
        ranks: Number of processes.
        args: Positional arguments, the same on every rank; pickled.
        kwargs: Keyword arguments, likewise.
        timeout: Seconds for the whole call.
        init_group: Whether to initialise ``torch.distributed`` with gloo first.
        fresh: Whether to replace the workers afterwards.
        environment: Variables to set in the workers besides the parent's own.

    Returns:
        One value per rank.

    Raises:
        WorkerError: If a rank raised, hung or died; the first one on top, every rank shown.
        ValueError: If the function cannot be imported by name.
    """
    __tracebackhide__ = True
    outcomes = collect_outcomes(
        function,
        ranks,
        args,
        kwargs,
        timeout=timeout,
        init_group=init_group,
        fresh=fresh,
        environment=environment,
        grace=_GRACE_SECONDS,
    )
    if any(outcome.failed for outcome in outcomes):
        raise WorkerError(_describe_failure(function, outcomes, timeout))
    skips = [outcome.skip for outcome in outcomes if outcome.skip is not None]
    if skips:
        import pytest

        pytest.skip(skips[0])
    return [outcome.value for outcome in outcomes]


def collect_outcomes(
    function: Callable[..., Any],
    ranks: int,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout: float = 60.0,
    init_group: bool = True,
    fresh: bool = False,
    environment: Mapping[str, str] | None = None,
    grace: float | None = None,
) -> list[RankOutcome]:
    """Like :func:`run_distributed`, but say what became of each rank instead of raising; for tests of failures.

    Args:
        function: See :func:`run_distributed`; so for the arguments not named here.
        ranks: Number of processes.
        args: Positional arguments.
        kwargs: Keyword arguments.
        timeout: Seconds for the whole call.
        init_group: Whether to initialise ``torch.distributed``.
        fresh: Whether to replace the workers afterwards.
        environment: Additional variables.
        grace: Seconds that the other ranks keep after the first one failed; None: until ``timeout``.

    Returns:
        One outcome per rank, in rank order.
    """
    workers = take_workers(ranks)
    healthy: list[Worker] = []
    with tempfile.TemporaryDirectory(prefix="d9d-ranks-") as folder:
        try:
            jobs = _make_jobs(function, ranks, (tuple(args), dict(kwargs or {})), timeout, init_group, folder)
            jobs = [_with_environment(job, environment or {}) for job in jobs]
            for worker, job in zip(workers, jobs, strict=True):
                worker.start(job)
            outcomes = _watch(workers, jobs, timeout, grace)
            if not fresh:
                healthy = [w for w, outcome in zip(workers, outcomes, strict=True) if not outcome.failed]
        finally:
            for worker in workers:
                if worker not in healthy:
                    worker.kill()
        return_workers(healthy)
    return outcomes


def _make_jobs(
    function: Callable[..., Any], ranks: int, call: tuple[Any, Any], timeout: float, init_group: bool, folder: str
) -> list[Job]:
    if "<" in function.__qualname__:
        raise ValueError(
            f"{function.__qualname__!r} is a lambda or lives inside another function, and workers import functions by "
            "name; move it to the top level of its module and pass what it needs as args"
        )
    file = inspect.getsourcefile(inspect.unwrap(function))
    base = dict(os.environ, OMP_NUM_THREADS="1", WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    base.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(find_free_port()))
    if sys.platform == "linux":
        base.setdefault("GLOO_SOCKET_IFNAME", "lo")
    payload = pickle.dumps(call)
    return [
        Job(
            rank=rank,
            ranks=ranks,
            module=function.__module__,
            qualname=function.__qualname__,
            file=file,
            payload=payload,
            timeout=timeout,
            init_group=init_group,
            store_path=str(Path(folder, "store")),
            output_path=str(Path(folder, f"output.{rank}")),
            stack_path=str(Path(folder, f"stack.{rank}")),
            search_path=tuple(sys.path),
            environment=base | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            directory=os.getcwd(),
        )
        for rank in range(ranks)
    ]


def _with_environment(job: Job, environment: Mapping[str, str]) -> Job:
    job.environment.update(environment)
    return job


def _watch(workers: list[Worker], jobs: list[Job], timeout: float, grace: float | None) -> list[RankOutcome]:
    outcomes: dict[int, RankOutcome] = {}
    deadline = time.monotonic() + timeout
    wake_time = float("inf")
    while len(outcomes) < len(workers):
        waiting = {rank: worker for rank, worker in enumerate(workers) if rank not in outcomes}
        until = min(deadline, wake_time)
        ready = set(wait([w.connection for w in waiting.values()], max(0.0, until - time.monotonic())))
        if not ready and until < deadline:
            # The sockets of failed ranks close with them, which wakes the peers that wait for them.
            for rank in outcomes:
                if outcomes[rank].failed:
                    workers[rank].process.kill()
            wake_time = float("inf")
        elif not ready:
            outcomes.update(_kill_hanging(waiting, jobs))
            break
        for rank, worker in waiting.items():
            if worker.connection in ready:
                outcomes[rank] = _receive(rank, worker, jobs[rank])
                if outcomes[rank].failed:
                    # Not at once: a peer about to raise the same error should tell its own story.
                    wake_time = time.monotonic() + _WAKE_SECONDS
                    deadline = min(deadline, time.monotonic() + grace) if grace is not None else deadline
    return [outcomes[rank] for rank in range(len(workers))]


def _receive(rank: int, worker: Worker, job: Job) -> RankOutcome:
    try:
        report: Report = pickle.loads(worker.connection.recv_bytes())
    except (EOFError, ConnectionError):
        now = time.monotonic()
        worker.process.join()
        output = _read(job.output_path) + _read(job.stack_path)
        return RankOutcome(rank, exit_code=worker.process.exitcode, output=output, time=now)
    output = _read(job.output_path)
    if report.kind == "value":
        return RankOutcome(rank, value=pickle.loads(report.payload), output=output, time=report.time)
    if report.kind == "skip":
        return RankOutcome(rank, skip=report.text, output=output, time=report.time)
    return RankOutcome(rank, error=report.text, error_type=report.error_type, output=output, time=report.time)


def _kill_hanging(waiting: Mapping[int, Worker], jobs: list[Job]) -> dict[int, RankOutcome]:
    now = time.monotonic()
    for worker in waiting.values():
        worker.signal(signal.SIGUSR1)
    while time.monotonic() < now + _STACK_SECONDS and not all(_read(jobs[rank].stack_path) for rank in waiting):
        time.sleep(0.02)
    # The handler writes line by line; leave it the time to finish.
    time.sleep(0.1)
    outcomes = {}
    for rank, worker in waiting.items():
        worker.process.kill()
        stack = _read(jobs[rank].stack_path) or "(no stack: the process did not answer the signal)"
        outcomes[rank] = RankOutcome(rank, stack=stack, output=_read(jobs[rank].output_path), time=now)
    return outcomes


def _read(path: str) -> str:
    file = Path(path)
    return file.read_text(errors="replace") if file.exists() else ""


def _describe_failure(function: Callable[..., Any], outcomes: list[RankOutcome], timeout: float) -> str:
    failed = sorted((o for o in outcomes if o.failed), key=lambda o: (o.time, o.rank))
    fine = [o.rank for o in outcomes if not o.failed]
    parts = [f"{function.__qualname__} failed on {len(failed)} of {len(outcomes)} ranks, the first one on top"]
    for position, outcome in enumerate(failed):
        later = f", {outcome.time - failed[0].time:.3f} s after the first" if position else ""
        if outcome.error is not None:
            told = f"raised{later}:\n{outcome.error}"
        elif outcome.stack is not None:
            told = f"was still running and was killed (limit {timeout:g} s{later}); its threads:\n{outcome.stack}"
        else:
            told = f"lost its process{later}: exit code {outcome.exit_code}{_signal_name(outcome.exit_code)}"
        parts.append(f"---- rank {outcome.rank} {told.rstrip()}")
        if outcome.output.strip():
            parts.append(f"  rank {outcome.rank} wrote:\n{outcome.output[-_OUTPUT_SHOWN:].rstrip()}")
    if fine:
        parts.append(f"---- finished without error: ranks {', '.join(map(str, fine))}")
    return "\n".join(parts)


def _signal_name(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return ""
    return f" ({signal.Signals(-exit_code).name})"
