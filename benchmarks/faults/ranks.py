"""Runs a job once per rank, each in a process of its own, and tells how and when every one of them ended."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from d9d_lightning.testing.ports import find_free_port

# A line that reports an error, as Python or the failure watch writes it; frames and warnings do not count.
_ERROR_LINE = re.compile(
    r"^(\[rank\d+\]:)?\s*(([\w.]*(Error|Exception|Interrupt|Failure))\b(:|$)|.*rank \d+.* failed first)"
)
_PRELOADED = ["torch", "torch._dynamo", "torch.distributed.tensor", "lightning.pytorch", "torchmetrics"]


@dataclass(frozen=True)
class Ending:
    """How one rank ended.

    Attributes:
        exit_code: Negative: number of the signal; None: it had to be killed at the limit.
        seconds: After the fault struck first, or after the start where none was noted.
        text: Everything it wrote.
        left_behind: Whether a process that it had started was still there a few seconds later.
    """

    exit_code: int | None
    seconds: float
    text: str
    left_behind: bool = False

    @property
    def first_error(self) -> str:
        """The first line that reports an error; empty if there is none."""
        return next((line.strip() for line in self.text.splitlines() if _ERROR_LINE.match(line)), "")


def run_ranks(job: Callable[..., Any], count: int, /, *args: Any, limit_s: float = 40.0, **kwargs: Any) -> list[Ending]:
    """Run ``job(*args, **kwargs)`` on every rank.

    Args:
        job: A function of a module.
        count: Number of ranks.
        args: Its positional arguments.
        limit_s: Ranks that still run then are killed.
        kwargs: Its keyword arguments.

    Returns:
        One ending per rank.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    base = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": find_free_port()}
    with tempfile.TemporaryDirectory(prefix="d9d-faults-") as folder:
        logs = [Path(folder, f"rank{rank}.log") for rank in range(count)]
        processes = []
        for rank in range(count):
            environment = {name: str(value) for name, value in (base | {"RANK": rank, "LOCAL_RANK": rank}).items()}
            process = context.Process(target=_play, args=(environment, str(logs[rank]), job, args, kwargs))
            process.start()
            processes.append(process)
        ended = _wait_for(processes, time.monotonic() + limit_s)
        endings = []
        for process, log in zip(processes, logs, strict=True):
            struck = Path(f"{log}.struck")
            code = process.exitcode if process in ended else None
            text = log.read_text(errors="replace") if log.exists() else ""
            endings.append((code, ended.get(process, time.monotonic()), text, struck))
        left = [_has_descendants(process.pid) for process in processes]
        begin = min((float(s.read_text()) for *_, s in endings if s.exists() and s.read_text()), default=None)
        start = min(moment for _, moment, _, _ in endings) if begin is None else begin
        return [
            Ending(code, moment - start, text, stayed)
            for (code, moment, text, _), stayed in zip(endings, left, strict=True)
        ]


def note_moment() -> None:
    """Remember that the fault strikes now; works in a process that is about to die."""
    path = os.environ.get("D9D_FAULT_MOMENT")
    if path and not os.path.exists(path):
        Path(path).write_text(repr(time.monotonic()))


def _has_descendants(pid: int) -> bool:
    """Whether a process that this rank started outlives it; they get a few seconds to notice."""
    deadline = time.monotonic() + 3.0
    while time.monotonic() < deadline:
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return False
        time.sleep(0.05)
    return True


def _wait_for(processes: list[Any], deadline: float) -> dict[Any, float]:
    ended: dict[Any, float] = {}
    while len(ended) < len(processes) and time.monotonic() < deadline:
        waiting = {process.sentinel: process for process in processes if process not in ended}
        for sentinel in wait(list(waiting), max(0.0, deadline - time.monotonic())):
            process = waiting[sentinel]  # type: ignore[index]
            process.join()
            ended[process] = time.monotonic()
    for process in processes:
        if process not in ended:
            process.kill()
            process.join()
    return ended


def _play(environment: dict[str, str], log: str, job: Callable[..., Any], args: Any, kwargs: Any) -> None:
    os.environ.update(environment, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", D9D_FAULT_MOMENT=f"{log}.struck")
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setpgrp()  # whatever this rank starts can be found by its group afterwards
    job(*args, **kwargs)
