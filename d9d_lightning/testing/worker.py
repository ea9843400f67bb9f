"""The worker's side of :mod:`d9d_lightning.testing.processes`: run one job after another in one kept process.

A worker is forked from a server that has already imported torch, so a new one costs milliseconds. It serves jobs until
its pipe closes. Between jobs it destroys the process groups and resets what a test may have left behind: random state,
default dtype, gradient mode, environment and working directory.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__: list[str] = []

_LONGEST_LOCAL = 300
_BACKSTOP_SECONDS = 15.0


@dataclass(frozen=True)
class Job:
    """One function call on one rank. ``payload`` stays pickled until the function's module is imported."""

    rank: int
    ranks: int
    module: str
    qualname: str
    file: str | None
    payload: bytes
    timeout: float
    init_group: bool
    store_path: str
    output_path: str
    stack_path: str
    search_path: tuple[str, ...]
    environment: dict[str, str]
    directory: str


@dataclass(frozen=True)
class Report:
    """What a worker says about its job. ``kind`` is ``value``, ``error`` or ``skip``."""

    kind: str
    payload: bytes = b""
    text: str = ""
    error_type: str = ""
    time: float = 0.0


def serve(connection: Connection) -> None:
    """Run jobs that arrive on the pipe until it closes.

    Args:
        connection: This worker's end of the pipe.
    """
    # What the server loaded stays for good; collections between jobs then look at the jobs' own objects only.
    gc.freeze()
    connection.send_bytes(b"ready")
    while True:
        try:
            job: Job = pickle.loads(connection.recv_bytes())
            with open(job.stack_path, "w") as stacks:
                # faulthandler works from the signal handler itself, so a rank blocked inside gloo still answers.
                faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
                # If the parent is killed while this rank hangs, nobody else would end it.
                faulthandler.dump_traceback_later(job.timeout + _BACKSTOP_SECONDS, exit=True, file=stacks)
                report = run_job(job)
                connection.send_bytes(pickle.dumps(report))
                # A rank that is done keeps its groups until all are: closing early breaks a peer's last receive.
                connection.recv_bytes()
                answer = b"idle" if reset_process() else b"worn"
                faulthandler.cancel_dump_traceback_later()
                faulthandler.unregister(signal.SIGUSR1)
            connection.send_bytes(answer)
        except (EOFError, BrokenPipeError):
            return


def run_job(job: Job) -> Report:
    """Prepare the process for one job, call the function, and describe what came of it."""
    redirect_output(job.output_path)
    os.environ.clear()
    os.environ.update(job.environment)
    os.chdir(job.directory)
    sys.path[:] = job.search_path
    try:
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        random.seed(0)
        function = resolve_function(job)
        args, kwargs = pickle.loads(job.payload)
        if job.init_group:
            torch.distributed.init_process_group(
                "gloo",
                init_method=f"file://{job.store_path}",
                rank=job.rank,
                world_size=job.ranks,
                timeout=timedelta(seconds=job.timeout),
            )
            # Otherwise a rank that fails early shows up on a slow peer as a failure to connect.
            torch.distributed.barrier()
        value = function(*args, **kwargs)
        return Report("value", pickle.dumps(value), time=time.monotonic())
    except BaseException as error:
        # pytest.skip() raises a BaseException of pytest's own, which this package does not import.
        kind = "skip" if type(error).__name__ == "Skipped" else "error"
        text = str(error) if kind == "skip" else format_error(error)
        return Report(kind, text=text, error_type=type(error).__name__, time=time.monotonic())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def resolve_function(job: Job) -> Callable[..., Any]:
    """Import the function's module the way the parent has it and return the function without our decorator."""
    module = sys.modules.get(job.module)
    if module is None and job.file is None:
        module = importlib.import_module(job.module)
    if module is None:
        try:
            module = importlib.import_module(job.module)
        except ModuleNotFoundError as error:
            if error.name != job.module:
                raise
    if job.file is not None and (module is None or not same_file(getattr(module, "__file__", None), job.file)):
        # Two test folders may each have a test_x.py; pickled references need the module under the parent's name.
        spec = importlib.util.spec_from_file_location(job.module, job.file)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot import {job.module!r} from {job.file}; put the function into a module file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[job.module] = module
        spec.loader.exec_module(module)
    target: Any = module
    for name in job.qualname.split("."):
        target = getattr(target, name)
    layer = target
    while layer is not None:
        if getattr(layer, "runs_distributed", False):
            target = layer.__wrapped__
        layer = getattr(layer, "__wrapped__", None)
    return target  # type: ignore[no-any-return]


def same_file(left: str | None, right: str) -> bool:
    """Whether two paths name one file."""
    return left is not None and Path(left).resolve() == Path(right).resolve()


def format_error(error: BaseException) -> str:
    """Full traceback; for a failed assertion also the local variables of the user's innermost frame."""
    described = traceback.TracebackException.from_exception(error, capture_locals=isinstance(error, AssertionError))
    own = [frame for frame in described.stack if f"{os.sep}site-packages{os.sep}" not in frame.filename]
    for frame in described.stack:
        variables = frame.locals if own and frame is own[-1] else None
        frame.locals = {key: text[:_LONGEST_LOCAL] for key, text in variables.items()} if variables else None
    return "".join(described.format())


def redirect_output(path: str) -> None:
    """Send everything that this process writes, C++ included, to one file that the parent can show."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=2)


def reset_process() -> bool:
    """Leave nothing of one job to the next.

    Returns:
        Whether the process is as good as new.
    """
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    gc.collect()
    # torch caches what DTensor operations return, meshes and their dead groups included, and meshes compare by ranks.
    return not any(isinstance(thing, DeviceMesh) for thing in gc.get_objects())
