"""Values between processes: gloo and NCCL behind one interface.

Receives are posted ahead, into buffers allocated then; sends are started and left alone. On gloo a send is known to
have left only by waiting for it, so the queue is reaped in order once it is a few messages deep; what is waited for
was sent long ago.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_lightning.runtime.communication import StageCommunicationHandler
from d9d_lightning.runtime.executor import Values
from d9d_lightning.runtime.groups import PipelineGroups
from d9d_lightning.values import Plan, ValueId, ValueSpec

__all__ = ["ProcessTransport"]

_NONE_FLAGS = "~none"
"""Name of the message that says which gradients are None; sorts after every value."""

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
        self._handlers: dict[tuple[str, int, str], StageCommunicationHandler] = {}
        self._receiving: dict[tuple[str, int, int], list[dist.Work]] = {}
        self._sending: deque[list[dist.Work]] = deque()
        self._batched = dist.get_backend(groups.forward) == "nccl"

    def begin(self, plans: list[Plan]) -> None:
        """Prepare for a step: the plan of each microbatch."""
        self._plans = plans

    # ---- forward ---------------------------------------------------------------------------------------------------
    def send_forward(self, stage: int, microbatch: int, values: Values) -> None:
        handler = self._handler("fwd", stage, microbatch)
        self._start_send(handler.create_send_ops({v.name: t for v, t in values.items() if t is not None}))

    def post_forward(self, stage: int, microbatch: int) -> None:
        self._start_receive("fwd", stage, microbatch)

    def take_forward(self, stage: int, microbatch: int) -> dict[ValueId, Tensor]:
        arrived = self._finish_receive("fwd", stage, microbatch)
        return {ValueId.parse(name): tensor.detach() for name, tensor in arrived.items()}

    # ---- backward --------------------------------------------------------------------------------------------------
    def send_backward(self, stage: int, microbatch: int, gradients: Values) -> None:
        handler = self._handler("bwd", stage, microbatch)
        plan = self._plans[microbatch]
        if not gradients:
            return
        message = {v.name: _zeros(plan.spec(v)) if g is None else g for v, g in gradients.items()}
        flags = [gradients[value] is None for value in sorted(gradients)]
        message[_NONE_FLAGS] = torch.tensor(flags, dtype=torch.uint8)
        self._start_send(handler.create_send_ops(message))

    def post_backward(self, stage: int, microbatch: int) -> None:
        self._start_receive("bwd", stage, microbatch)

    def take_backward(self, stage: int, microbatch: int) -> dict[ValueId, Tensor | None]:
        arrived = self._finish_receive("bwd", stage, microbatch)
        flags = arrived.pop(_NONE_FLAGS, None)
        missing = [] if flags is None else flags.tolist()
        names = sorted(arrived)
        return {ValueId.parse(name): None if none else arrived[name] for name, none in zip(names, missing, strict=True)}

    # ---- both ------------------------------------------------------------------------------------------------------
    def finish(self) -> None:
        while self._sending:
            _wait(self._sending.popleft())

    def reset(self) -> None:
        """Forget what a failed step left behind."""
        self._receiving.clear()
        self._sending.clear()
        self._handlers.clear()

    def _start_send(self, operations: list[dist.P2POp]) -> None:
        if not operations:
            return
        self._sending.append(self._start(operations))
        if len(self._sending) > _QUEUE_DEPTH:
            _wait(self._sending.popleft())

    def _start_receive(self, direction: str, stage: int, microbatch: int) -> None:
        handler = self._handler(direction, stage, microbatch)
        self._receiving[direction, stage, microbatch] = self._start(handler.create_receive_ops(microbatch))

    def _finish_receive(self, direction: str, stage: int, microbatch: int) -> dict[str, Tensor]:
        _wait(self._receiving.pop((direction, stage, microbatch)))
        handler = self._handler(direction, stage, microbatch)
        return handler.get_inputs(microbatch) if handler.inputs else {}

    def _start(self, operations: list[dist.P2POp]) -> list[dist.Work]:
        if self._batched and operations:
            return list(dist.batch_isend_irecv(operations))
        return [work for op in operations if (work := op.op(op.tensor, group=op.group, **_peer(op))) is not None]

    def _handler(self, direction: str, stage: int, microbatch: int) -> StageCommunicationHandler:
        plan = self._plans[microbatch]
        key = (direction, stage, plan.digest)
        handler = self._handlers.get(key)
        if handler is None:
            make = self._make_forward if direction == "fwd" else self._make_backward
            handler = self._handlers[key] = make(plan, stage)
        return handler

    def _make_forward(self, plan: Plan, stage: int) -> StageCommunicationHandler:
        boundary = plan.boundaries[stage]
        return StageCommunicationHandler(
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

    def _make_backward(self, plan: Plan, stage: int) -> StageCommunicationHandler:
        boundary = plan.boundaries[stage]
        return StageCommunicationHandler(
            "bwd",
            stage,
            _MANY,
            stage + 1 if stage < self._last else None,
            _gradient_specs(plan, boundary.sends),
            stage - 1 if stage > 0 else None,
            _gradient_specs(plan, boundary.receives),
            self._hosts,
            self._groups.backward,
            self._device,
        )


_MANY = 1 << 30
"""A handler serves any number of microbatches of its signature."""


def _gradient_specs(plan: Plan, values: tuple[ValueId, ...]) -> Mapping[str, ValueSpec]:
    specs = {
        value.name: ValueSpec(spec.shape, spec.stride, spec.dtype, spec.device, False)
        for value in values
        if (spec := plan.spec(value)).requires_grad
    }
    if specs:
        specs[_NONE_FLAGS] = ValueSpec((len(specs),), (1,), torch.uint8, "cpu", False)
    return specs


def _peer(operation: dist.P2POp) -> dict[str, int]:
    name = "group_dst" if operation.op is dist.isend else "group_src"
    return {name: operation.group_peer}


def _zeros(spec: ValueSpec) -> Tensor:
    return torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()
