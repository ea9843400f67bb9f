"""Counting what a unit costs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

__all__ = ["FlopCounter", "counted_flops"]


class FlopCounter(TorchDispatchMode):
    """Sums torch's own formulas over the operators of one call."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self.total += formula(*args, **(kwargs or {}), out_val=out)
        return out


@contextlib.contextmanager
def counted_flops(wanted: bool) -> Iterator[FlopCounter]:
    """A counter around one call, which stays at zero, and costs nothing, where nobody wants to know."""
    counter = FlopCounter()
    with counter if wanted else contextlib.nullcontext():
        yield counter
