"""Kept worker processes: forked once from a server that has torch imported, used by one test after another."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import signal
import sys
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess

from d9d_lightning.errors import WorkerError
from d9d_lightning.testing.worker import Job, serve

__all__: list[str] = []

_START_SECONDS = 180.0
_RESET_SECONDS = 20.0
_ALWAYS_LOADED = ("torch", "torch._dynamo", "torch.distributed.tensor", "d9d_lightning.testing.worker")
# Seconds each to import; loaded once in the server when the parent has them, instead of once in every worker.
_LOADED_LIKE_PARENT = ("lightning.pytorch", "torchmetrics", "transformers")

_idle: list[Worker] = []
_all: set[Worker] = set()
_context: ForkServerContext | None = None


class Worker:
    """The parent's handle of one worker process."""

    def __init__(self) -> None:
        context = _forkserver()
        self.connection: Connection
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=serve, args=(theirs,), name="d9d-test-worker")
        self.process.start()
        theirs.close()
        _all.add(self)

    def wait_ready(self) -> None:
        """Block until the worker's first sign of life.

        Raises:
            WorkerError: If it does not come up.
        """
        if not self.connection.poll(_START_SECONDS):
            self.kill()
            raise WorkerError(
                f"a worker process did not start within {_START_SECONDS:.0f} s; is the machine out of memory?"
            )
        self.connection.recv_bytes()

    def start(self, job: Job) -> None:
        """Hand over a job; its report arrives on :attr:`connection`."""
        self.connection.send_bytes(pickle.dumps(job))

    def signal(self, number: signal.Signals) -> None:
        """Send a signal if the process still exists."""
        if self.process.is_alive() and self.process.pid is not None:
            os.kill(self.process.pid, number)

    def kill(self) -> int | None:
        """End the process, forget it, and return its exit code."""
        self.process.kill()
        self.process.join()
        self.connection.close()
        _all.discard(self)
        return self.process.exitcode


def take_workers(count: int) -> list[Worker]:
    """Idle workers, as many as asked for; new ones replace those that died."""
    workers: list[Worker] = []
    while _idle and len(workers) < count:
        worker = _idle.pop()
        if worker.process.is_alive():
            workers.append(worker)
        else:
            worker.kill()
    fresh = [Worker() for _ in range(count - len(workers))]
    for worker in fresh:
        worker.wait_ready()
    return workers + fresh


def return_workers(workers: list[Worker]) -> None:
    """Let finished workers destroy their groups together, then keep those that answer."""
    for worker in workers:
        worker.connection.send_bytes(b"reset")
    for worker in workers:
        try:
            if worker.connection.poll(_RESET_SECONDS) and worker.connection.recv_bytes() == b"idle":
                _idle.append(worker)
                continue
        except (EOFError, ConnectionError):
            pass
        worker.kill()


def kill_all() -> None:
    """End every worker of this process; new ones are started when needed."""
    _idle.clear()
    for worker in list(_all):
        worker.kill()


def _forkserver() -> ForkServerContext:
    global _context
    if _context is None:
        _context = multiprocessing.get_context("forkserver")
        loaded = [name for name in _LOADED_LIKE_PARENT if name in sys.modules]
        _context.set_forkserver_preload([*_ALWAYS_LOADED, *loaded])
        # The number of OpenMP threads is read when torch is imported, in the server.
        before = os.environ.get("OMP_NUM_THREADS")
        os.environ["OMP_NUM_THREADS"] = "1"
        try:
            multiprocessing.forkserver.ensure_running()  # type: ignore[attr-defined]
        finally:
            if before is None:
                del os.environ["OMP_NUM_THREADS"]
            else:
                os.environ["OMP_NUM_THREADS"] = before
        # Runs before multiprocessing's own exit handler, which would join workers that wait for jobs.
        atexit.register(kill_all)
    return _context
