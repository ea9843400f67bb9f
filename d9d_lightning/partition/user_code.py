"""Finding the user's own line in a stack that is mostly torch's and ours."""

from __future__ import annotations

import linecache
import os
import sys

__all__ = ["describe_user_line"]

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARIES = ("torch", "lightning", "pytorch_lightning", "torchmetrics")


def _is_library(filename: str) -> bool:
    if filename.startswith((_OURS, "<")):
        return True
    parts = filename.replace(os.sep, "/").split("/site-packages/")
    return len(parts) > 1 and parts[1].split("/")[0] in _LIBRARIES


def describe_user_line() -> str:
    """``file:line in function: source`` of the innermost frame that is neither torch's nor ours."""
    frame = sys._getframe(1)
    while frame is not None:
        filename = frame.f_code.co_filename
        if not _is_library(filename):
            source = linecache.getline(filename, frame.f_lineno).strip()
            return f"{filename}:{frame.f_lineno} in {frame.f_code.co_name}: `{source}`"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "a line"
