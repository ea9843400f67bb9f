"""The end of a process in the dead tier: say why, flush, leave. Nothing here may wait for anything without a limit."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable

from d9d_lightning.runtime.watch_process import ProcessState
from d9d_lightning.runtime.watch_store import Beat

__all__ = ["EXIT_CODE", "leave_process", "wait_for_others"]

EXIT_CODE = 1
_STANDARD_ERROR = 2
_LAST_RESORT_S = 5.0


def leave_process(text: str, before_exit: Callable[[], None]) -> None:
    """Print ``text``, flush what this process has written so far, and end it.

    Args:
        text: What to print on standard error.
        before_exit: Called after the text is out; bounded by the caller.
    """
    # A flush blocks where the main thread holds the stream's lock or nobody reads the pipe. This timer lives in C, so
    # it ends the process even while another thread keeps Python's lock.
    faulthandler.dump_traceback_later(_LAST_RESORT_S, exit=True, file=_STANDARD_ERROR)
    # One write, below Python's streams: their locks may be held by the thread that is stuck.
    os.write(_STANDARD_ERROR, f"\n{text}\n".encode(errors="replace"))
    flusher = threading.Thread(target=_flush_everything, daemon=True)
    flusher.start()
    before_exit()
    flusher.join(_LAST_RESORT_S / 2)
    _end_workers()
    os._exit(EXIT_CODE)


def wait_for_others(beats: Callable[[], dict[int, Beat]], limit_s: float) -> None:
    """Keep the store alive until the other processes have read the report and left; end those of this host that stay.

    Args:
        beats: Last beat of every other rank.
        limit_s: How long to wait, in seconds.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if all(beat.closed or beat.process.state() is ProcessState.GONE for beat in beats().values()):
            return
        time.sleep(0.02)
    for beat in beats().values():
        if not beat.closed:
            beat.process.kill()


def _end_workers() -> None:
    """End workers of data loaders, as a normal exit does; left alone they stay for seconds."""
    with contextlib.suppress(RuntimeError, OSError, ValueError):  # the main thread may be starting or ending one
        for child in multiprocessing.active_children():
            if child.daemon:
                child.kill()


def _flush_everything() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    logging.shutdown()
