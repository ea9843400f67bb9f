"""One trainable parameter: how many accumulations it has had, and how its gradient gets into a flat buffer and back.

``parameter.grad`` is the truth until the reduction starts. Whatever the user does to it before then (None, another
tensor, ``.data = ...``, in-place changes) is what gets reduced; the buffer is only where it is reduced. So the first
accumulation of a step is copied into the buffer, ``parameter.grad`` becomes an alias of it, and later accumulations
land in the buffer without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from d9d_lightning.gradients.tensors import dense_stride, local_gradient, local_tensor, wrap_like

__all__: list[str] = []


@dataclass(frozen=True, slots=True)
class BufferRange:
    """Where a gradient lies in a flat buffer, in elements."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class GradientSlot:
    """One trainable parameter during its synchronizer's life.

    Attributes:
        name: For error messages.
        parameter: The parameter.
        dtype: Element type in which its gradient is accumulated.
        required: Accumulations that make it done; None: only :attr:`marked` does.
        expected: The same for this step only, where it was derived from the step's beginning.
        count: Accumulations in this step.
        marked: The caller has said that all accumulations are done.
        touched: An accumulation has reached ``parameter.grad`` since it was last zeroed by the synchronizer.
    """

    def __init__(self, name: str, parameter: torch.Tensor, dtype: torch.dtype | None) -> None:
        self.name = name
        self.parameter = parameter
        self.dtype = dtype
        self.required: int | None = None
        self.expected: int | None = None
        self.count = 0
        self.marked = False
        self.touched = False
        self._original_dtype = parameter.grad_dtype
        self._alias: torch.Tensor | None = None
        self._handed: torch.Tensor | None = None
        self._range: BufferRange | None = None
        self._handle: RemovableHandle | None = None

    @property
    def done(self) -> bool:
        """Whether another accumulation in this step would be one too many."""
        return self.marked or (self.limit is not None and self.count >= self.limit)

    @property
    def limit(self) -> int | None:
        """Accumulations that make it done in this step; None: unknown."""
        return self.required if self.expected is None else self.expected

    @property
    def settled(self) -> bool:
        """Whether the bucket need not wait for this parameter: it is done, or was frozen meanwhile."""
        return self.done or not self.parameter.requires_grad

    @property
    def progress(self) -> str:
        """For error messages."""
        return f"{self.name} ({self.count} of {'unknown' if self.limit is None else self.limit} accumulations)"

    def begin_step(self) -> None:
        """Forget what was counted."""
        self.count = 0
        self.marked = False
        self.expected = None

    def listen(self, accumulated: Callable[[GradientSlot], None]) -> RemovableHandle:
        """Call ``accumulated`` after each accumulation, until the returned handle is removed."""
        self._handle = self.parameter.register_post_accumulate_grad_hook(lambda _: accumulated(self))
        return self._handle

    def listens_last(self) -> bool:
        """Whether no hook was registered after ours; if one was, ours comes after it from the next time on."""
        hooks: Any = self.parameter._post_accumulate_grad_hooks
        if self._handle is None or hooks is None or next(reversed(hooks)) == self._handle.id:
            return True
        # Not move_to_end(): autograd reads the order of the plain dict beneath.
        hooks[self._handle.id] = hooks.pop(self._handle.id)
        return False

    def place(self, buffer: torch.Tensor, offset: int) -> None:
        """Give the gradient its range of a flat buffer, keeping a gradient that exists already."""
        local = local_tensor(self.parameter)
        self._range = BufferRange(offset, tuple(local.shape), dense_stride(local))
        self._alias = _alias(buffer, self._range)
        self._handed = None
        if self.parameter.grad is not None:
            self._take()
            self.touched = True

    def restore_dtype(self) -> None:
        """Accumulate in :attr:`dtype` again, keeping a gradient that exists."""
        if self.parameter.grad_dtype == self.dtype:
            return
        gradient = self.parameter.grad
        self.parameter.grad = None
        self.parameter.grad_dtype = self.dtype
        if gradient is not None:
            self.parameter.grad = gradient if self.dtype is None else gradient.to(self.dtype)

    def lower_dtype(self) -> None:
        """Give the optimizer a gradient in the parameter's own element type."""
        gradient = self.parameter.grad
        if gradient is not None and gradient.dtype != self.parameter.dtype:
            self.parameter.grad = None
            self.parameter.grad_dtype = self.parameter.dtype
            self.parameter.grad = gradient.to(self.parameter.dtype)

    def release(self) -> None:
        """Leave the parameter as it was before bind, without a gradient."""
        self.parameter.grad = None
        self.parameter.grad_dtype = self._original_dtype
        self._alias = self._handed = None

    def zero(self, buffer: torch.Tensor | None, set_to_none: bool) -> None:
        """Drop the gradient; with a buffer and not ``set_to_none``, put zeros of the buffer in its place."""
        self.touched = False
        self.parameter.grad = None
        self.restore_dtype()
        if buffer is not None and not set_to_none:
            self.hand_over(buffer)

    def absorb(self, buffer: torch.Tensor | None) -> None:
        """After an accumulation, make sure that the gradient lies in the buffer."""
        if self.parameter.grad is None:
            return
        self.touched = True
        self.restore_dtype()
        if buffer is not None and not self._is_attached():
            self._take()
            self.hand_over(buffer)

    def collect(self) -> bool:
        """Before a reduction, bring whatever the gradient is now into the buffer.

        Returns:
            Whether there is a gradient at all.
        """
        if self._alias is None:
            return self.parameter.grad is not None
        if self.parameter.grad is None:
            self._alias.zero_()
            return False
        if not self._is_attached():
            self._take()
            return True
        # Zeros that nobody accumulated into may still have been written to in place.
        return self.touched or bool(self._alias.any())

    def hand_over(self, buffer: torch.Tensor) -> None:
        """Make ``parameter.grad`` an alias of the buffer's range."""
        if self._range is None:
            return
        # The alias given out last will do, unless the user repointed it by ``grad.data = ...``.
        if self._handed is None or not self._lies_in_buffer(self._handed):
            self._handed = wrap_like(_alias(buffer, self._range), self.parameter)
        gradient = self.parameter.grad
        if gradient is self._handed:
            return
        if gradient is not None and gradient.dtype != self.dtype:
            self.parameter.grad = None
        self.restore_dtype()
        self.parameter.grad = self._handed

    def _is_attached(self) -> bool:
        gradient = self.parameter.grad
        return gradient is not None and self._lies_in_buffer(gradient)

    def _lies_in_buffer(self, gradient: torch.Tensor) -> bool:
        local, alias = local_tensor(gradient), self._alias
        return (
            alias is not None
            and local.layout == torch.strided
            and local.data_ptr() == alias.data_ptr()
            and local.dtype == alias.dtype
            and local.stride() == alias.stride()
        )

    def _take(self) -> None:
        gradient = local_gradient(self.parameter)
        if gradient is None or self._alias is None:
            return
        if gradient.layout != torch.strided:
            gradient = gradient.to_dense()
        if gradient.is_cuda:
            # The allocator must not reuse it on its own stream while this one still reads.
            gradient.record_stream(torch.cuda.current_stream(gradient.device))
        self._alias.copy_(gradient.detach())


def _alias(buffer: torch.Tensor, place: BufferRange) -> torch.Tensor:
    # Not a view: detach_() and version counters of a gradient must not know of its neighbours.
    alias = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
    return alias.set_(buffer.untyped_storage(), place.offset, place.shape, place.stride)
