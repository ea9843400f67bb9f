"""Values between processes: gloo and NCCL behind one interface.

Receives are posted two actions ahead where the backend allows it, into buffers allocated then; sends are started and
left alone. On gloo a send is known to have left only by waiting for it, so the queue is reaped in order once it is a
few messages deep; what is waited for was sent long ago. A receiver takes a message with a header later than others, so
in a step that has sent one nothing is waited for before the end.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_lightning.errors import UnplannedCallError
from d9d_lightning.runtime.communication import StageCommunicationHandler
from d9d_lightning.runtime.executor import Values, blank
from d9d_lightning.runtime.groups import PipelineGroups
from d9d_lightning.runtime.headers import (
    MessageHeader,
    MessageNumbers,
    checks_every_message,
    describe_expected,
    describe_sent,
)
from d9d_lightning.runtime.inbox import HEADER_TAGS, Inbox, MessageKey
from d9d_lightning.values import Plan, ValueId, ValueSpec

__all__ = ["ProcessTransport"]

_NONE_FLAGS = "~none"
"""Name of the message that says which gradients are None; sorts after every value.

Which ones are follows from the plan, so it is sent with the first microbatch of a plan only, and checked afterwards.
"""

_RECEIVES_AHEAD = 2
"""Actions for which receives are posted before their turn, where the backend matches messages at any time."""

_QUEUE_DEPTH = 8
"""Sends in flight before the oldest is waited for."""


class ProcessTransport:
    """Moves values between the ranks of one pipeline.

    Args:
        groups: The pipeline's groups.
        stage_to_rank: Pipeline rank of every stage.
        device: Device of this rank's stages.
    """

    def __init__(self, groups: PipelineGroups, stage_to_rank: tuple[int, ...], device: torch.device) -> None:
        self._groups = groups
        self._hosts = {stage: groups.process_of[rank] for stage, rank in enumerate(stage_to_rank)}
        self._last = len(stage_to_rank) - 1
        self._device = device
        self._plans: list[Plan] = []
        self._handlers: dict[tuple[str, int, str, bool], StageCommunicationHandler] = {}
        self._sending: deque[list[dist.Work]] = deque()
        self._patterns: dict[tuple[int, str], tuple[bool, ...]] = {}
        self._received_patterns: dict[tuple[int, str], tuple[bool, ...]] = {}
        self._announced: set[tuple[int, str]] = set()
        self.problem: Exception | None = None
        self._batched = dist.get_backend(groups.forward) == "nccl"
        # a batched backend runs its operations one after the other: what is posted early would hold up what is due
        self.receives_ahead = 0 if self._batched else _RECEIVES_AHEAD
        self._inbox = Inbox(groups, self._batched)
        self._check_all = checks_every_message()
        self._sent, self._expected = MessageNumbers(), MessageNumbers()
        self._introduced: set[tuple[str, str, int, str]] = set()
        self._patient = False

    def begin(self, plans: list[Plan]) -> ProcessTransport:
        """Prepare for a step: the plan of each microbatch. Returns itself."""
        self._plans = plans
        self.problem = None
        self._patient = False
        return self

    # ---- forward ---------------------------------------------------------------------------------------------------
    def send_forward(self, stage: int, microbatch: int, values: Values) -> None:
        message = {value.name: tensor for value, tensor in values.items() if tensor is not None}
        self._start_send(self._handler("fwd", stage, microbatch), message, ("fwd", stage + 1, microbatch))

    def post_forward(self, stage: int, microbatch: int) -> None:
        self._start_receive("fwd", stage, microbatch)

    def take_forward(self, stage: int, microbatch: int) -> dict[ValueId, Tensor]:
        arrived = self._finish_receive("fwd", stage, microbatch)
        return {_parse(name): tensor for name, tensor in arrived.items()}

    # ---- backward --------------------------------------------------------------------------------------------------
    def send_backward(self, stage: int, microbatch: int, gradients: Values) -> None:
        plan = self._plans[microbatch]
        if not gradients:
            return
        message = {v.name: blank(plan.spec(v)) if g is None else g for v, g in gradients.items()}
        pattern = tuple([gradients[value] is None for value in sorted(gradients)])
        edge = (stage, plan.digest)
        first = edge not in self._patterns
        if first:
            self._patterns[edge] = pattern
            message[_NONE_FLAGS] = torch.tensor(pattern, dtype=torch.uint8)
        elif pattern != self._patterns[edge]:
            self.problem = UnplannedCallError(
                f"stage {stage} sends gradients for other values than before (None: {pattern}, was "
                f"{self._patterns[edge]})"
            )
        self._start_send(self._handler("bwd", stage, microbatch, first), message, ("bwd", stage - 1, microbatch))

    def post_backward(self, stage: int, microbatch: int) -> None:
        edge = (stage + 1, self._plans[microbatch].digest)
        first = edge not in self._announced
        self._announced.add(edge)
        self._start_receive("bwd", stage, microbatch, first)

    def take_backward(self, stage: int, microbatch: int) -> dict[ValueId, Tensor | None]:
        arrived = self._finish_receive("bwd", stage, microbatch)
        edge = (stage + 1, self._plans[microbatch].digest)
        flags = arrived.pop(_NONE_FLAGS, None)
        if flags is not None:
            self._received_patterns[edge] = tuple(bool(flag) for flag in flags.tolist())
        pattern = self._received_patterns.get(edge, ())
        return {
            _parse(name): None if none else tensor
            for (name, tensor), none in zip(sorted(arrived.items()), pattern, strict=bool(arrived))
        }

    # ---- both ------------------------------------------------------------------------------------------------------
    def finish(self) -> None:
        while self._sending:
            _wait(self._sending.popleft())

    def reset(self) -> None:
        """Forget what a failed step left behind."""
        self._inbox.clear()
        self._sending.clear()
        self._handlers.clear()
        self._patterns.clear()
        self._received_patterns.clear()
        self._announced.clear()
        self._introduced.clear()
        self._sent, self._expected = MessageNumbers(), MessageNumbers()

    def _start_send(self, handler: StageCommunicationHandler, message: Mapping[str, Tensor], key: MessageKey) -> None:
        wires = handler.create_sends(message)
        if not wires:
            return
        works = self._send_header(key, wires[0][1], lambda: describe_sent(handler, message, wires))
        if self._batched:
            works += dist.batch_isend_irecv(handler.send_ops(wires))
        else:
            send = handler.group.send
            works += [send([wire], peer, 0) for wire, peer in wires]
        self._sending.append(works)
        if len(self._sending) > _QUEUE_DEPTH and not self._patient:
            _wait(self._sending.popleft())

    def _send_header(self, key: MessageKey, peer: int, describe: Callable[[], tuple[str, ...]]) -> list[Any]:
        number = self._sent.take(key[0], peer)
        if not self._has_header("sent", key):
            return []
        self._patient = True
        header = _header(key, number, describe())
        return [self._groups.control.send([header.to_tensor()], peer, HEADER_TAGS[key[0]])]

    def _has_header(self, end: str, key: MessageKey) -> bool:
        """Whether a message has a header: the first one of its signature, or any."""
        direction, stage, microbatch = key
        edge = (end, direction, stage, self._plans[microbatch].digest)
        known = edge in self._introduced
        self._introduced.add(edge)
        return self._check_all or not known

    def _start_receive(self, direction: str, stage: int, microbatch: int, with_flags: bool = False) -> None:
        handler = self._handler(direction, stage, microbatch, with_flags)
        wires = handler.create_receives(microbatch)
        key = (direction, stage, microbatch)
        header = None
        if wires:
            number = self._expected.take(direction, wires[0][1])
            if self._has_header("expected", key):
                header = _header(key, number, describe_expected(handler, wires, self._device))
        self._inbox.post(key, handler, wires, header)

    def _finish_receive(self, direction: str, stage: int, microbatch: int) -> dict[str, Tensor]:
        handler = self._inbox.take((direction, stage, microbatch))
        return handler.get_inputs(microbatch) if handler.inputs else {}

    def _handler(
        self, direction: str, stage: int, microbatch: int, with_flags: bool = False
    ) -> StageCommunicationHandler:
        plan = self._plans[microbatch]
        key = (direction, stage, plan.digest, with_flags)
        handler = self._handlers.get(key)
        if handler is None:
            forward = direction == "fwd"
            made = self._make_forward(plan, stage) if forward else self._make_backward(plan, stage, with_flags)
            handler = self._handlers[key] = made
        return handler

    def _make_forward(self, plan: Plan, stage: int) -> StageCommunicationHandler:
        boundary = plan.boundaries[stage]
        handler = StageCommunicationHandler(
            "fwd",
            stage,
            _MANY,
            stage - 1 if stage > 0 else None,
            {value.name: plan.spec(value) for value in boundary.receives},
            stage + 1 if stage < self._last else None,
            {value.name: plan.spec(value) for value in boundary.sends},
            self._hosts,
            self._groups.forward,
            self._device,
        )
        handler.set_input_requires_grad_(False)  # the stage makes leaves of what arrives
        return handler

    def _make_backward(self, plan: Plan, stage: int, with_flags: bool) -> StageCommunicationHandler:
        boundary = plan.boundaries[stage]
        return StageCommunicationHandler(
            "bwd",
            stage,
            _MANY,
            stage + 1 if stage < self._last else None,
            _gradient_specs(plan, boundary.sends, with_flags),
            stage - 1 if stage > 0 else None,
            _gradient_specs(plan, boundary.receives, with_flags),
            self._hosts,
            self._groups.backward,
            self._device,
        )


_MANY = 1 << 30
"""A handler serves any number of microbatches of its signature."""


def _gradient_specs(plan: Plan, values: tuple[ValueId, ...], with_flags: bool) -> Mapping[str, ValueSpec]:
    specs = {
        value.name: ValueSpec(spec.shape, spec.stride, spec.dtype, spec.device, False)
        for value in values
        if (spec := plan.spec(value)).requires_grad
    }
    if specs and with_flags:
        specs[_NONE_FLAGS] = ValueSpec((len(specs),), (1,), torch.uint8, "cpu", False)
    return specs


def _header(key: MessageKey, number: int, tensors: tuple[str, ...]) -> MessageHeader:
    direction, stage, microbatch = key
    return MessageHeader(number, "values" if direction == "fwd" else "gradients", stage, microbatch, tensors)


@functools.cache
def _parse(name: str) -> ValueId:
    return ValueId.parse(name)


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
