"""Start the all-reduces of one flat buffer and wait for them: on a side stream on CUDA, as work handles elsewhere.

Stream order on CUDA, for one buffer: the streams that wrote gradients -> communication stream (division, all-reduces,
event) -> the stream that calls ``wait``. Nothing here blocks the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from d9d_lightning.gradients.plan import ReduceAxis

__all__: list[str] = []


class Reduction(ABC):
    """The reduction of one buffer, under way."""

    @abstractmethod
    def wait(self) -> None:
        """Return once later work of the caller (of its current stream, on CUDA) sees the reduced buffer."""


class HandleReduction(Reduction):
    """The path without streams. The first axis runs behind the caller's back; later axes start in :meth:`wait`.

    Every rank waits for its buckets in the same order, so later axes meet their peers too.
    """

    def __init__(self, buffer: torch.Tensor, axes: Sequence[ReduceAxis]) -> None:
        self._buffer = buffer
        self._later = tuple(axes[1:])
        divide_for_average(buffer, axes)
        self._work = dist.all_reduce(buffer, group=axes[0].group, async_op=True)

    def wait(self) -> None:
        """Block until every axis is reduced."""
        self._work.wait()
        for axis in self._later:
            dist.all_reduce(self._buffer, group=axis.group)


class StreamReduction(Reduction):
    """The CUDA path."""

    def __init__(
        self,
        buffer: torch.Tensor,
        axes: Sequence[ReduceAxis],
        stream: torch.cuda.Stream,
        writers: Iterable[torch.cuda.Stream],
    ) -> None:
        self._device = buffer.device
        for writer in writers:
            stream.wait_stream(writer)
        with torch.cuda.stream(stream):
            divide_for_average(buffer, axes)
            for axis in axes:
                # Not asynchronous: the communication stream, not the host, waits for each axis before the next.
                dist.all_reduce(buffer, group=axis.group)
            self._done = stream.record_event()

    def wait(self) -> None:
        """Let the current stream wait; the host goes on."""
        torch.cuda.current_stream(self._device).wait_event(self._done)


class Communicator:
    """Chooses the path by device, and owns the side stream of each CUDA device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(
        self, buffer: torch.Tensor, axes: Sequence[ReduceAxis], writers: Iterable[torch.cuda.Stream]
    ) -> Reduction:
        """Begin to reduce a buffer in place, over one axis after the other.

        Args:
            buffer: Contiguous; not to be touched before :meth:`Reduction.wait`.
            axes: At least one axis.
            writers: CUDA streams that wrote to the buffer; ignored elsewhere.

        Returns:
            The reduction under way.
        """
        if buffer.device.type != "cuda":
            return HandleReduction(buffer, axes)
        if buffer.device not in self._streams:
            self._streams[buffer.device] = torch.cuda.Stream(buffer.device)
        return StreamReduction(buffer, axes, self._streams[buffer.device], writers)

    def release(self) -> None:
        """Make buffers safe to free: the allocator knows only the stream that they were made on."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)
        self._streams.clear()


def divide_for_average(buffer: torch.Tensor, axes: Sequence[ReduceAxis]) -> None:
    """Divide before the sum, not after it: half precision must not overflow on the way."""
    replicas = 1
    for axis in axes:
        replicas *= axis.size if axis.average else 1
    if replicas > 1:
        buffer.mul_(1.0 / replicas)
