"""Refusing to differentiate in the middle of a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from d9d_lightning.errors import PartitionError
from d9d_lightning.partition.interception import CallPolicy, Interceptor
from d9d_lightning.partition.user_code import describe_user_line

__all__ = ["no_differentiation"]


@contextlib.contextmanager
def no_differentiation(interceptor: Interceptor, tracer: CallPolicy) -> Iterator[None]:
    """Refuse ``torch.autograd.grad`` and ``backward`` in glue: the graph behind a value ends at its stage."""
    originals = {name: getattr(torch.autograd, name) for name in ("grad", "backward")}

    def guard(name: str) -> Callable[..., Any]:
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if interceptor.is_inside(tracer):
                return originals[name](*args, **kwargs)
            raise PartitionError(
                f"{describe_user_line()} calls torch.autograd.{name} between units. The graph behind a value ends "
                "where its stage ends, so a step cannot differentiate through several units. Expected: the "
                "differentiated part inside one unit; name it with units=[...] in D9DStrategy, or use one process."
            )

        return guarded

    try:
        for name in originals:
            setattr(torch.autograd, name, guard(name))
        yield
    finally:
        for name, original in originals.items():
            setattr(torch.autograd, name, original)
