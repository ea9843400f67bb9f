"""Units called inside a user's own ``torch.autograd.Function``, as reversible networks do.

Its backward runs the layers again, or parts of them, in ways that no trace sees; so all of them must be one unit,
together with the module that applies the function.
"""

from __future__ import annotations

import sys

import torch

from d9d_lightning.errors import PartitionError

__all__ = ["InsideFunctionError", "refuse_inside_function"]

_APPLY = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
_REENTRANT = "CheckpointFunction"


class InsideFunctionError(PartitionError):
    """A unit was called inside a custom function.

    Attributes:
        unit: The unit.
    """

    def __init__(self, unit: str, function: str) -> None:
        super().__init__(
            f"unit {unit!r} is called inside the custom autograd function {function}, whose backward cannot be cut "
            "into stages. Expected: one unit around the whole function; name it with units=[...] in D9DStrategy."
        )
        self.unit = unit


def refuse_inside_function(unit: str) -> None:
    """Raise if the caller runs inside a custom function.

    Raises:
        InsideFunctionError: It does.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _APPLY:
            name = getattr(frame.f_locals.get("cls"), "__name__", "?")
            if name != _REENTRANT:
                raise InsideFunctionError(unit, name)
        if frame.f_back is None:
            return
        frame = frame.f_back
