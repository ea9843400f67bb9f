"""Headers of messages: what a sender has really sent, told ahead in a lane of its own, so that a receiver can refuse.

A message of another size than its receiver waits for is the worst that can happen to a transfer: gloo ends the process
when it is larger, and leaves the rest of the buffer as it was when it is smaller. So the first message of each
signature, and with ``D9D_DEBUG=1`` every message, has a header that the receiver reads before it gives a buffer away.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from d9d_lightning.errors import MessageMismatchError
from d9d_lightning.runtime.communication import StageCommunicationHandler, Wire
from d9d_lightning.stage.descriptors import ReceiveStageInput

__all__ = [
    "HEADER_BYTES",
    "MessageHeader",
    "MessageNumbers",
    "checks_every_message",
    "describe_expected",
    "describe_sent",
]

Lines = tuple[str, ...]

HEADER_BYTES = 2048
"""Size of a header on its way; what does not fit is compared by its digest and not shown."""

_DIGEST_BYTES = 16


def checks_every_message() -> bool:
    """Whether this process was started with ``D9D_DEBUG=1``."""
    return os.environ.get("D9D_DEBUG", "0") not in ("", "0")


@dataclass(frozen=True, slots=True)
class MessageHeader:
    """One message between two ranks, as one of them sees it.

    Attributes:
        number: How many messages went from this sender to this receiver in this direction before it.
        content: ``"values"`` or ``"gradients"``.
        stage: The stage that receives them.
        microbatch: The microbatch.
        tensors: One text for each tensor, in wire order.
    """

    number: int
    content: str
    stage: int
    microbatch: int
    tensors: Lines

    def __str__(self) -> str:
        head = f"message {self.number}, {self.content} of microbatch {self.microbatch} for stage {self.stage}"
        return "\n".join([head, *self.tensors])

    def to_tensor(self) -> Tensor:
        """Form in which it travels: a digest of the text, then as much of the text as has room."""
        text = str(self).encode()
        payload = (_digest(text) + text).ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES]
        return torch.frombuffer(bytearray(payload), dtype=torch.uint8)

    def check(self, came: Tensor, sender: str, receiver: str) -> None:
        """Compare with the header that came.

        Args:
            came: What the sender's :meth:`to_tensor` gave.
            sender: Name of the sending rank.
            receiver: Name of this rank.

        Raises:
            MessageMismatchError: The sender sends something else.
        """
        payload = came.numpy().tobytes()
        if payload[:_DIGEST_BYTES] == _digest(str(self).encode()):
            return
        text = payload[_DIGEST_BYTES:].rstrip(b"\0").decode(errors="replace")
        action = f"{self.stage}{'F' if self.content == 'values' else 'B'}{self.microbatch}"
        raise MessageMismatchError(
            f"{receiver} got another message from {sender} than it expects for action {action}; nothing of it was used."
            f"\nExpected: {_indent(str(self))}\nCame: {_indent(text)}\nBoth ranks must run the same program of the "
            "same plan, with the same versions of every package. Type D9D_DEBUG=1 before the command, on all ranks, to "
            "have every message checked; if the ranks were started alike, report this with both texts."
        )


@dataclass
class MessageNumbers:
    """Counts the messages between two ranks in one direction, on either end."""

    _next: dict[tuple[str, int], int] = field(default_factory=dict)

    def take(self, content: str, peer: int) -> int:
        """Number of the next message."""
        number = self._next.get((content, peer), 0)
        self._next[content, peer] = number + 1
        return number


def describe_sent(handler: StageCommunicationHandler, message: Mapping[str, Tensor], wires: Sequence[Wire]) -> Lines:
    """Lines of a header for what a handler sends, from the tensors and wires themselves."""
    tensors = [(name, message[name]) for name in handler.outputs if message[name].numel() > 0]
    return tuple(
        _describe(name, tensor.shape, tensor.dtype, tensor.device.type, wire)
        for (name, tensor), (wire, _) in zip(tensors, wires, strict=True)
    )


def describe_expected(handler: StageCommunicationHandler, wires: Sequence[Wire], device: torch.device) -> Lines:
    """Lines of a header for what a handler waits for, from what both ends have agreed on and its own buffers."""
    metas = [(name, entry.meta) for name, entry in handler.inputs.items() if isinstance(entry, ReceiveStageInput)]
    filled = [(name, meta) for name, meta in metas if 0 not in meta.shape]
    return tuple(
        _describe(name, meta.shape, meta.dtype, meta.device_type or device.type, wire)
        for (name, meta), (wire, _) in zip(filled, wires, strict=True)
    )


def _describe(name: str, shape: Sequence[int], dtype: torch.dtype, device: str, wire: Tensor) -> str:
    kind = str(dtype).removeprefix("torch.")
    return f"{name} {kind} {tuple(shape)} on {device}, {wire.numel() * wire.element_size()} bytes"


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()


def _indent(text: str) -> str:
    return text.replace("\n", "\n  ")
