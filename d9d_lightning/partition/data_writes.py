"""``parameter.data = value`` in glue, as averages of weights are often written.

The assignment gives a parameter the memory of another tensor, past torch's dispatcher: no trace would see the write,
and a placeholder's missing memory would end the process. Here it copies the content instead, which reads the same
afterwards. Other tensors than parameters take the memory, as ever, unless a placeholder is involved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from d9d_lightning.partition.placeholder import is_placeholder

__all__ = ["data_writes_routed"]

_ORIGINAL: Any = torch._C.TensorBase.data


@contextlib.contextmanager
def data_writes_routed(is_glue: Callable[[], bool], is_step: Callable[[], bool]) -> Iterator[None]:
    """Copy what glue assigns to ``.data`` of a parameter within the block.

    Args:
        is_glue: Whether code between units runs at this moment.
        is_step: Whether that is the step's, and not a hook's, which may swap the memory of two parameters.
    """

    def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
        held = is_placeholder(tensor) or is_placeholder(value)
        fits = tensor.shape == value.shape and tensor.dtype == value.dtype
        if is_glue() and fits and (held or (is_step() and isinstance(tensor, nn.Parameter))):
            with torch.no_grad():
                _ORIGINAL.__get__(tensor).copy_(value)
        else:
            _ORIGINAL.__set__(tensor, value)

    before = torch.Tensor.__dict__.get("data")
    setattr(torch.Tensor, "data", property(_ORIGINAL.__get__, assign))  # noqa: B010
    try:
        yield
    finally:
        if before is None:
            delattr(torch.Tensor, "data")
        else:
            setattr(torch.Tensor, "data", before)  # noqa: B010
