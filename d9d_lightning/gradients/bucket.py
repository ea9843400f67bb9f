"""Buckets: parameters whose gradients are reduced together.

A bucket goes through accumulating -> ready -> launched -> accumulating. The synchronizer decides when a ready bucket
is launched, because the order of launches is a matter of all buckets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from d9d_lightning.gradients.plan import ReduceAxis
from d9d_lightning.gradients.reduction import Communicator, Reduction
from d9d_lightning.gradients.slot import GradientSlot
from d9d_lightning.gradients.tensors import local_tensor

__all__ = ["AbstractGradientBucket", "LocalGradientBucket", "SyncGradientBucket"]

_ALIGNMENT_BYTES = 64


class AbstractGradientBucket(ABC):
    """Gradients that become ready, are reduced and are handed over together.

    Attributes:
        slots: The parameters, in the order in which backward is expected to reach them.
        begun: Some parameter became done in this step.
        launched: The reduction has begun; no gradient may change until :meth:`mark_sync`.
    """

    def __init__(self, slots: Sequence[GradientSlot]) -> None:
        self.slots = tuple(slots)
        self.begun = False
        self.launched = False
        self._pending = set(self.slots)

    @property
    def ready(self) -> bool:
        """Whether every parameter has had all its accumulations."""
        return not self._pending

    @property
    def is_reducing(self) -> bool:
        """Whether other ranks have, or are about to have, this rank's gradients of this step."""
        return False

    @property
    def unready_slots(self) -> list[GradientSlot]:
        """Parameters that still wait for accumulations."""
        return [slot for slot in self.slots if not slot.settled]

    def begin_step(self) -> None:
        """Count from zero."""
        self.begun = False
        self.launched = False
        for slot in self.slots:
            slot.begin_step()
        self.refresh()

    def refresh(self) -> None:
        """Look again at which parameters are pending, after requirements changed."""
        self._pending = set(self.unready_slots)

    def settle(self, slot: GradientSlot) -> None:
        """Note that one parameter is done."""
        self.begun = True
        self._pending.discard(slot)

    @abstractmethod
    def bind(self) -> None:
        """Allocate what the bucket needs and take over the gradients that exist."""

    @abstractmethod
    def unbind(self) -> None:
        """Free what the bucket holds and leave the parameters without gradients."""

    @abstractmethod
    def zero_grad(self, set_to_none: bool = False) -> None:
        """Drop the gradients.

        Args:
            set_to_none: Leave None where a buffer of zeros would be attached otherwise.
        """

    @abstractmethod
    def absorb(self, slot: GradientSlot) -> None:
        """Take notice of an accumulation into one parameter."""

    @abstractmethod
    def launch(self) -> None:
        """Begin the reduction of the gradients as they are now; parameters without one take part with zeros."""

    @abstractmethod
    def mark_sync(self) -> None:
        """Complete the reduction and hand the gradients over; None where no replica has one."""


class LocalGradientBucket(AbstractGradientBucket):
    """Gradients that no other rank has a share of. They stay where autograd puts them."""

    def bind(self) -> None:
        """See the base class."""
        for slot in self.slots:
            slot.restore_dtype()

    def unbind(self) -> None:
        """See the base class."""
        for slot in self.slots:
            slot.release()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """See the base class; there is no buffer, so gradients become None in either case."""
        for slot in self.slots:
            slot.zero(None, set_to_none=True)

    def absorb(self, slot: GradientSlot) -> None:
        """See the base class."""
        slot.absorb(None)

    def launch(self) -> None:
        """See the base class; nothing to send."""
        self.launched = True

    def mark_sync(self) -> None:
        """See the base class."""


class SyncGradientBucket(AbstractGradientBucket):
    """Gradients in one flat buffer that is all-reduced over one axis after the other.

    Behind the gradients the buffer holds one flag per parameter, 1 where this rank has a gradient. After the reduction
    a flag above 0 says that some replica has one, without a second collective.

    Args:
        slots: The parameters; all of one device and one gradient element type.
        axes: What to reduce over, at least one axis.
        communicator: Starts the reductions.
    """

    def __init__(self, slots: Sequence[GradientSlot], axes: Sequence[ReduceAxis], communicator: Communicator) -> None:
        super().__init__(slots)
        self.axes = tuple(axes)
        self._communicator = communicator
        self._buffer: torch.Tensor | None = None
        self._flags = torch.empty(0)
        self._used: list[bool] = []
        self._reduction: Reduction | None = None
        self._writers: set[torch.cuda.Stream] = set()

    @property
    def is_reducing(self) -> bool:
        """See the base class."""
        return self.launched

    @property
    def buffer(self) -> torch.Tensor:
        """The flat buffer. ``[elements + flags]``"""
        if self._buffer is None:
            raise RuntimeError("this bucket has no buffer; call bind() before using it")
        return self._buffer

    def bind(self) -> None:
        """See the base class."""
        first = self.slots[0]
        dtype = first.dtype
        if dtype is None:
            raise ValueError(f"{first.name} has no gradient element type; give its slot a dtype")
        step = max(1, _ALIGNMENT_BYTES // dtype.itemsize)
        offsets, end = [], 0
        for slot in self.slots:
            offsets.append(end)
            end += -(-local_tensor(slot.parameter).numel() // step) * step
        self._buffer = torch.zeros(end + len(self.slots), dtype=dtype, device=local_tensor(first.parameter).device)
        self._flags = self._buffer[end:]
        for slot, offset in zip(self.slots, offsets, strict=True):
            slot.restore_dtype()
            slot.place(self._buffer, offset)
            slot.hand_over(self._buffer)

    def unbind(self) -> None:
        """See the base class."""
        for slot in self.slots:
            slot.release()
        self._buffer = None
        self._flags = torch.empty(0)
        # A reduction of a step that failed may never end; whoever gives up on the step must not wait for it.
        self._reduction = None
        self._writers.clear()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """See the base class."""
        if not set_to_none:
            self.buffer.zero_()
        for slot in self.slots:
            slot.zero(self.buffer, set_to_none)

    def absorb(self, slot: GradientSlot) -> None:
        """See the base class."""
        slot.absorb(self.buffer)
        self._note_writer()

    def launch(self) -> None:
        """See the base class."""
        self._used = [slot.collect() for slot in self.slots]
        self._flags.fill_(1)
        for index, is_used in enumerate(self._used):
            if not is_used:
                self._flags[index].zero_()
        self._note_writer()
        self.launched = True
        self._reduction = self._communicator.start(self.buffer, self.axes, self._writers)
        self._writers = set()

    def mark_sync(self) -> None:
        """See the base class."""
        if self._reduction is None:
            return
        self._reduction.wait()
        self._reduction = None
        if all(self._used):
            used = self._used
        else:
            # Only a rank that lacks a gradient has to ask, so no other host ever waits for its device here.
            used = [abs(flag) > 0 for flag in self._flags.tolist()]
        for slot, has_gradient in zip(self.slots, used, strict=True):
            slot.touched = has_gradient
            if has_gradient:
                slot.hand_over(self.buffer)
            else:
                slot.parameter.grad = None

    def _note_writer(self) -> None:
        # Accumulations may run on several streams; the reduction has to wait for all of them, not only the last.
        if self.buffer.is_cuda:
            self._writers.add(torch.cuda.current_stream(self.buffer.device))
