"""Receives of one rank that were posted and not yet taken; headers are read before a buffer is given away."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_lightning.runtime.communication import StageCommunicationHandler, Wire
from d9d_lightning.runtime.groups import PipelineGroups
from d9d_lightning.runtime.headers import HEADER_BYTES, MessageHeader

__all__ = ["HEADER_TAGS", "Inbox", "MessageKey"]

MessageKey = tuple[str, int, int]
"""Direction, receiving stage and microbatch."""

HEADER_TAGS = {"fwd": 1, "bwd": 2}
"""Headers travel through the control group, which is gloo everywhere, in a lane of their own for each direction."""


@dataclass
class _Posted:
    handler: StageCommunicationHandler
    wires: list[Wire]
    peer: int
    header: MessageHeader | None
    header_work: dist.Work | None = None
    header_buffer: Tensor | None = None
    works: list[dist.Work] | None = None


@dataclass
class Inbox:
    """Messages are matched by their order, so a buffer is given away only after those of all messages before it.

    Behind a header that has not been read yet buffers wait in the order in which they were posted, which is the
    order in which their sender sends. Where the backend batches its operations, a buffer that is given away late could
    block what the sender does next, so there it is given away at once, and the header read before the tensors are used.

    Attributes:
        groups: The pipeline's groups.
        batched: Whether the backend batches its operations.
    """

    groups: PipelineGroups
    batched: bool
    _posted: dict[MessageKey, _Posted] = field(default_factory=dict)
    _held_back: dict[tuple[str, int], deque[_Posted]] = field(default_factory=dict)

    def post(
        self, key: MessageKey, handler: StageCommunicationHandler, wires: list[Wire], header: MessageHeader | None
    ) -> None:
        """Prepare for a message.

        Args:
            key: Which one.
            handler: Owns the buffers.
            wires: The buffers, and the rank that fills them.
            header: What the message must say of itself; None where it has no header.
        """
        message = _Posted(handler, wires, wires[0][1] if wires else -1, header)
        self._posted[key] = message
        if header is not None:
            message.header_buffer = torch.empty(HEADER_BYTES, dtype=torch.uint8)
            message.header_work = self.groups.control.recv([message.header_buffer], message.peer, HEADER_TAGS[key[0]])
        waiting = self._held_back.setdefault((key[0], message.peer), deque())
        if self.batched or not (waiting or header):
            self._give_buffers(message)
        else:
            waiting.append(message)

    def take(self, key: MessageKey) -> StageCommunicationHandler:
        """Wait for a message; its handler then has the tensors.

        Raises:
            MessageMismatchError: Its header, or that of a message before it, is not the expected one.
        """
        message = self._posted.pop(key)
        waiting = self._held_back[key[0], message.peer]
        while message.works is None:
            self._read_header(waiting[0])
            self._give_buffers(waiting.popleft())
        self._read_header(message)
        for work in message.works:
            work.wait()
        return message.handler

    def clear(self) -> None:
        """Forget what a failed step left behind."""
        self._posted.clear()
        self._held_back.clear()

    def _read_header(self, message: _Posted) -> None:
        work, buffer, header = message.header_work, message.header_buffer, message.header
        if work is None or buffer is None or header is None:
            return
        work.wait()
        message.header_work = None
        header.check(buffer, self._name(message.peer), self._name(dist.get_rank(self.groups.control)))

    def _give_buffers(self, message: _Posted) -> None:
        if self.batched:
            operations = message.handler.receive_ops(message.wires)
            message.works = list(dist.batch_isend_irecv(operations)) if operations else []
        else:
            receive = message.handler.group.recv
            message.works = [receive([wire], peer, 0) for wire, peer in message.wires]

    def _name(self, peer: int) -> str:
        return f"rank {dist.get_global_rank(self.groups.control, peer)}"
