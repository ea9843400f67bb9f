"""Memory for large weight gradients on the CPU, used again within one weight pass.

A plain backward writes each weight gradient into memory that an activation has just left. A weight pass runs when those
are gone, so the allocator fetches fresh pages from the system for every gradient and returns them after it was added to
``.grad``: on 2048 x 512 weights that costs a third of the product itself. Here one buffer serves one weight after the
other. Accelerators have caching allocators and do not need it.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Scratch"]

_LEAST_BYTES = 2**18
_count_owners = getattr(torch._C, "_storage_Use_Count", None)


class Scratch:
    """The buffers of one weight pass; they go when it ends."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lent: list[Tensor] = []

    def multiply(self, left: Tensor, right: Tensor) -> Tensor:
        """The product of two matrices, in recycled memory where that pays."""
        num_elements = left.shape[0] * right.shape[1]
        if (
            num_elements * left.itemsize < _LEAST_BYTES
            or left.device.type != "cpu"
            or _count_owners is None
            or not _is_plain(left)
            or not _is_plain(right)
            or torch.is_autocast_enabled("cpu")
        ):
            return left.mm(right)
        buffer = self._take(num_elements, left)
        return torch.mm(left, right, out=buffer[:num_elements].view(left.shape[0], right.shape[1]))

    def recycle(self) -> None:
        """Take back the buffers that nobody else holds: autograd adopts some as ``.grad``, and a hook may keep any."""
        lent, self._lent = self._lent, []
        for buffer in lent:
            # two owners: the buffer itself, and the storage object made for the question
            is_free = _count_owners is not None and _count_owners(buffer.untyped_storage()._cdata) == 2
            (self._free if is_free else self._lent).append(buffer)

    def _take(self, num_elements: int, like: Tensor) -> Tensor:
        for index, buffer in enumerate(self._free):
            if buffer.numel() >= num_elements and buffer.dtype == like.dtype:
                self._lent.append(self._free.pop(index))
                return self._lent[-1]
        self._lent.append(torch.empty(num_elements, dtype=like.dtype))
        return self._lent[-1]


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout is torch.strided
