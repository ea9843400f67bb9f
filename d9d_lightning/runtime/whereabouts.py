"""Where a process is within a step: its action, and the unit that the user's step has called.

Nothing is recorded for this while a step runs. The unit is read from the frames of the call, and only when somebody
asks: the watch of a rank that hangs, or the report of an error.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType

__all__ = ["Doing", "Outside", "place_of_failure", "unit_among"]

_PACKAGE = str(Path(__file__).parents[1])
_NOT_THE_USERS = (_PACKAGE, "<", *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")))


def unit_among(frames: Iterable[FrameType]) -> str:
    """Name of the innermost unit that a call policy runs in one of the frames, outermost frame first; "" if none."""
    found = ""
    for frame in frames:
        code = frame.f_code
        if code.co_name == "call" and code.co_filename.startswith(_PACKAGE):
            unit = frame.f_locals.get("unit", "")
            found = unit if isinstance(unit, str) and unit else found
    return found


def place_of_failure(action: object, error: BaseException) -> str:
    """Text such as ``3F5, unit model.layers.7`` for an error that came out of an action."""
    return _join(action, unit_among(_frames_of(error.__traceback__)))


@dataclass(frozen=True, slots=True)
class Doing:
    """An action under way in a thread. Its text is made when it is read, from any thread.

    Attributes:
        action: The action.
        thread: Identifier of the thread that runs it.
    """

    action: object
    thread: int = field(default_factory=threading.get_ident)

    def __str__(self) -> str:
        frame = sys._current_frames().get(self.thread)
        frames = [one for one, _ in traceback.walk_stack(frame)] if frame is not None else []
        return _join(self.action, unit_among(reversed(frames)))


@dataclass(frozen=True, slots=True)
class Outside:
    """A thread between two actions; its text names the line of the user's code that it is in, if any.

    Attributes:
        thread: Identifier of the thread.
    """

    thread: int = field(default_factory=threading.get_ident)

    def __str__(self) -> str:
        frame = sys._current_frames().get(self.thread)
        for one, line in traceback.walk_stack(frame) if frame is not None else ():
            code = one.f_code
            if not code.co_filename.startswith(_NOT_THE_USERS):
                return f"outside of any action, in {code.co_name} ({code.co_filename}:{line})"
        return "outside of any action"


def _frames_of(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _join(action: object, unit: str) -> str:
    return f"{action}, unit {unit}" if unit else str(action)
