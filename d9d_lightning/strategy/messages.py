"""Small python values from the loss owner to the other ranks of its pipeline, one message where they fit.

A generic object broadcast sends a size first and the bytes after it, and tensors cost a storage each. Here the first
message has a fixed size and carries the bytes too; zero-dim tensors travel as numbers.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_map

from d9d_lightning.errors import PipelineError

__all__ = ["Messenger", "RemoteError"]

FIRST_MESSAGE_BYTES = 4096
HEADER_BYTES = 8


@dataclass(frozen=True)
class _Scalar:
    """A zero-dim tensor on its way."""

    value: bool | int | float | complex
    dtype: torch.dtype


class RemoteError(PipelineError, RuntimeError):
    """The loss owner failed while it prepared a message; carries its text."""


@dataclass(frozen=True)
class Messenger:
    """Sends from one process of a group to all others.

    Attributes:
        group: A gloo group, or None where the pipeline has one process.
        source: Global rank of the sender.
        is_source: Whether this process is the sender.
        device: Where received tensors are put.
    """

    group: ProcessGroup | None
    source: int
    is_source: bool
    device: torch.device

    def share(self, make: Callable[[], Any]) -> Any:
        """Value of ``make()`` on the source, on every process of the group; collective.

        Raises:
            Exception: On the source, whatever ``make`` raised.
            RemoteError: On the others, in the same case, so that no process goes on alone.
        """
        if self.group is None:
            return make()
        if not self.is_source:
            return self._receive()
        try:
            value = make()
            payload = pickle.dumps((True, tree_map(_pack, value)))
        except Exception as error:
            self._send(pickle.dumps((False, f"{type(error).__name__}: {error}")))
            raise
        self._send(payload)
        return value

    def _send(self, payload: bytes) -> None:
        first = torch.zeros(FIRST_MESSAGE_BYTES, dtype=torch.uint8)
        first[:HEADER_BYTES] = _as_bytes(len(payload).to_bytes(HEADER_BYTES, "little"))
        head = payload[: FIRST_MESSAGE_BYTES - HEADER_BYTES]
        first[HEADER_BYTES : HEADER_BYTES + len(head)] = _as_bytes(head)
        dist.broadcast(first, self.source, group=self.group)
        if len(payload) > len(head):
            dist.broadcast(_as_bytes(payload[len(head) :]), self.source, group=self.group)

    def _receive(self) -> Any:
        first = torch.zeros(FIRST_MESSAGE_BYTES, dtype=torch.uint8)
        dist.broadcast(first, self.source, group=self.group)
        length = int.from_bytes(first[:HEADER_BYTES].numpy().tobytes(), "little")
        payload = first[HEADER_BYTES:].numpy().tobytes()[:length]
        if length > len(payload):
            rest = torch.zeros(length - len(payload), dtype=torch.uint8)
            dist.broadcast(rest, self.source, group=self.group)
            payload += rest.numpy().tobytes()
        fine, value = pickle.loads(payload)
        if not fine:
            raise RemoteError(f"the rank that owns the loss failed: {value}")
        return tree_map(self._unpack, value)

    def _unpack(self, leaf: Any) -> Any:
        if isinstance(leaf, _Scalar):
            return torch.tensor(leaf.value, dtype=leaf.dtype, device=self.device)
        if isinstance(leaf, Tensor):
            return leaf.to(self.device)
        return leaf


def _as_bytes(payload: bytes) -> Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)


def _pack(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = leaf.detach()
    if leaf.dim() == 0:
        return _Scalar(leaf.item(), leaf.dtype)
    return leaf.cpu()
