"""A transport between ranks that live in one process."""

from __future__ import annotations

from torch import Tensor

from d9d_lightning.runtime.executor import Values
from d9d_lightning.values import ValueId

__all__ = ["Mailbox", "MailboxTransport"]


class Mailbox:
    """Messages under way, by direction, receiving stage and microbatch."""

    def __init__(self) -> None:
        self.messages: dict[tuple[str, int, int], Values] = {}


class MailboxTransport:
    """One rank's access to the mailbox."""

    problem: Exception | None = None
    receives_ahead = 0

    def __init__(self, mailbox: Mailbox) -> None:
        self._messages = mailbox.messages

    def send_forward(self, stage: int, microbatch: int, values: Values) -> None:
        self._messages["forward", stage + 1, microbatch] = {v: _travel(t) for v, t in values.items()}

    def post_forward(self, stage: int, microbatch: int) -> None:
        """Nothing to prepare."""

    def take_forward(self, stage: int, microbatch: int) -> dict[ValueId, Tensor]:
        return dict(self._messages.pop(("forward", stage, microbatch)))  # type: ignore[arg-type]

    def send_backward(self, stage: int, microbatch: int, gradients: Values) -> None:
        self._messages["backward", stage - 1, microbatch] = {v: _travel(t) for v, t in gradients.items()}

    def post_backward(self, stage: int, microbatch: int) -> None:
        """Nothing to prepare."""

    def take_backward(self, stage: int, microbatch: int) -> dict[ValueId, Tensor | None]:
        return dict(self._messages.pop(("backward", stage, microbatch)))

    def finish(self) -> None:
        """Nothing to wait for."""


def _travel(tensor: Tensor | None) -> Tensor | None:
    # what arrives never shares memory with what was sent
    return None if tensor is None else tensor.detach().clone()
