"""Writes finished traces from a thread of its own, so that compressing one does not hold up a training step."""

from __future__ import annotations

import os
import tarfile
import tempfile
import warnings
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

__all__ = ["FinishedTrace", "TraceWriter"]

# Finished traces that may wait for the writer; each holds every recorded event in memory.
_MAX_WAITING = 2


class FinishedTrace(Protocol):
    """The one method of torch's profiler that writing needs."""

    def export_chrome_trace(self, path: str) -> object:
        """Write the trace as JSON."""


class TraceWriter:
    """A context in which traces can be handed in; leaving it waits until all are on disk.

    A trace that cannot be written costs a warning, never the training run.
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[Path, Future[None]]] = deque()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="d9d-trace-writer")

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        while self._waiting:
            self._settle_oldest()
        self._thread.shutdown()

    def submit(self, trace: FinishedTrace, path: Path) -> None:
        """Have ``trace`` written to ``path``, a ``.tar.gz``. Waits only while too many others wait."""
        while len(self._waiting) >= _MAX_WAITING:
            self._settle_oldest()
        self._waiting.append((path, self._thread.submit(write_archive, trace, path)))

    def _settle_oldest(self) -> None:
        path, outcome = self._waiting.popleft()
        error = outcome.exception()
        if error is not None:
            warnings.warn(f"The trace {path} was not written: {type(error).__name__}: {error}", stacklevel=2)


def write_archive(trace: FinishedTrace, path: Path) -> None:
    """Write an archive with one JSON file in it, under its final name only once it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    name = path.name.removesuffix(".tar.gz")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{name}-") as folder:
        raw, packed = Path(folder, f"{name}.json"), Path(folder, path.name)
        trace.export_chrome_trace(str(raw))
        with tarfile.open(packed, "w:gz", compresslevel=6) as archive:
            archive.add(raw, arcname=raw.name)
        os.replace(packed, path)
