"""Running one rank's program.

The executor takes actions in order and asks a stage to compute or the transport to move tensors. It names no schedule
and knows no gradients' fate: it tells an observer when its forwards and its weight gradients are done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from d9d_lightning.runtime.early_receives import EarlyReceives
from d9d_lightning.schedule import ActionBase, ActionKind, Program
from d9d_lightning.stage.stage import PipelineStage
from d9d_lightning.values import ValueId, ValueSpec

__all__ = ["Monitor", "Observer", "PipelineExecutor", "Transport", "Values", "blank"]

Result = TypeVar("Result")
Values = Mapping[ValueId, Tensor | None]


class Observer(Protocol):
    """Told of progress, also where a stage has failed and nothing is computed any more."""

    def forwards_done(self, failed: bool) -> None:
        """The last forward of this rank has run; whether any action has failed."""

    def weights_due(self, stage: int, microbatch: int) -> None:
        """Weight gradients of a stage and microbatch are about to be accumulated."""

    def weights_done(self, stage: int, microbatch: int) -> None:
        """All weight gradients of a stage and microbatch have been accumulated."""


class Monitor(Protocol):
    """Told which action runs, so that a rank that hangs can say where."""

    def enter(self, action: object) -> None:
        """An action begins."""

    def leave(self) -> None:
        """It ended."""

    def report(self, error: BaseException) -> None:
        """This rank has failed, and the others may not come to hear of it where they wait."""


class Transport(Protocol):
    """Moves values between ranks. Sends and posted receives return at once; ``take`` waits.

    Attributes:
        problem: What makes the step of this rank fail although every action ran.
        receives_ahead: For how many actions ahead receives may be posted; 0 where one could block what comes before it.
    """

    problem: Exception | None
    receives_ahead: int

    def send_forward(self, stage: int, microbatch: int, values: Values) -> None:
        """Send the outputs of a stage to the rank of the next one."""

    def post_forward(self, stage: int, microbatch: int) -> None:
        """Prepare to receive the inputs of a stage."""

    def take_forward(self, stage: int, microbatch: int) -> dict[ValueId, Tensor]:
        """Wait for the inputs of a stage."""

    def send_backward(self, stage: int, microbatch: int, gradients: Values) -> None:
        """Send the gradients of a stage's inputs to the rank of the previous one."""

    def post_backward(self, stage: int, microbatch: int) -> None:
        """Prepare to receive the gradients of a stage's outputs."""

    def take_backward(self, stage: int, microbatch: int) -> dict[ValueId, Tensor | None]:
        """Wait for the gradients of a stage's outputs."""

    def finish(self) -> None:
        """Wait until everything sent has left."""


class PipelineExecutor:
    """One rank's part of one step.

    Args:
        rank: Rank in the pipeline.
        program: What every rank does.
        stages: This rank's stages by number.
        transport: Moves tensors to and from other ranks.
        observer: Told of progress.

    Attributes:
        failure: The first exception of a stage. From then on nothing is computed, but the program goes on with zeros of
            the planned shapes, so that no peer is left waiting and the groups stay usable.
        failed_action: The action that raised it.
        failed_at: When, in seconds of the wall clock.
    """

    def __init__(
        self,
        rank: int,
        program: Program,
        stages: Mapping[int, PipelineStage],
        transport: Transport,
        observer: Observer | None = None,
    ) -> None:
        self.actions = program.actions[rank]
        self.failure: Exception | None = None
        self.failed_action: ActionBase | None = None
        self.failed_at = 0.0
        self._stages = stages
        self._transport = transport
        self._observer = observer
        self._last = program.num_stages - 1
        self._local = {
            stage for stage in range(self._last) if program.stage_to_rank[stage] == program.stage_to_rank[stage + 1]
        }
        self._forwards_left = sum(part.kind is ActionKind.F for action in self.actions for part in action.parts)
        self._forward_inbox: dict[tuple[int, int], Values] = {}
        self._forward_outbox: dict[tuple[int, int], Values] = {}
        self._backward_inbox: dict[tuple[int, int], Values] = {}
        self._backward_outbox: dict[tuple[int, int], Values] = {}

    def run(self, monitor: Monitor | None = None) -> None:
        """Run all actions, then wait for the last sends."""
        early = EarlyReceives(self.actions, self._transport.receives_ahead, self.execute)
        for position, action in enumerate(self.actions):
            if monitor is not None:
                monitor.enter(action)
            if not early.has_run(position):
                self.execute(action)
            if monitor is not None:
                monitor.leave()
        self._transport.finish()
        if self.failure is None:
            self.failure = self._transport.problem

    def execute(self, action: ActionBase) -> None:
        """Run one action."""
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        if kind is ActionKind.OVERLAP:
            for part in action.parts:
                self.execute(part)
        elif kind is ActionKind.RECV_F:
            self._transport.post_forward(stage, microbatch)
        elif kind is ActionKind.RECV_B:
            self._transport.post_backward(stage, microbatch)
        elif kind is ActionKind.SEND_F:
            self._transport.send_forward(stage, microbatch, self._forward_outbox.pop((stage, microbatch)))
        elif kind is ActionKind.SEND_B:
            self._transport.send_backward(stage, microbatch, self._backward_outbox.pop((stage, microbatch)))
        else:
            self._compute(action)

    def _compute(self, action: ActionBase) -> None:
        kind, stage, microbatch = action.kind, action.stage, action.microbatch
        if kind is ActionKind.F:
            self._forward(action, self._stages[stage], microbatch)
            self._forwards_left -= 1
            if self._observer is not None and not self._forwards_left:
                self._observer.forwards_done(self.failure is not None)
        elif kind is ActionKind.W:
            self._announce_weights(stage, microbatch)
            if self.failure is None:
                self._attempt(action, lambda: self._stages[stage].backward_weight(microbatch))
            self._report_weights(stage, microbatch)
        else:
            self._backward(action, self._stages[stage], microbatch)

    def _forward(self, action: ActionBase, stage: PipelineStage, microbatch: int) -> None:
        key = (stage.index, microbatch)
        received: Values = {}
        if stage.index > 0:
            local = stage.index - 1 in self._local
            received = self._forward_inbox.pop(key) if local else self._transport.take_forward(*key)
        sent: Values | None = None
        if self.failure is None:
            sent = self._attempt(action, lambda: stage.forward(microbatch, received))  # type: ignore[arg-type]
        if stage.index == self._last:
            return
        if sent is None:
            plan = stage.plan(microbatch)
            sent = {value: blank(plan.spec(value)) for value in plan.boundaries[stage.index].sends}
        box = self._forward_inbox if stage.index in self._local else self._forward_outbox
        box[(stage.index + 1, microbatch) if stage.index in self._local else key] = sent

    def _backward(self, action: ActionBase, stage: PipelineStage, microbatch: int) -> None:
        key = (stage.index, microbatch)
        gradients: Values = {}
        if stage.index < self._last:
            local = stage.index in self._local
            gradients = self._backward_inbox.pop(key) if local else self._transport.take_backward(*key)
        full = action.kind is ActionKind.B
        if full:
            self._announce_weights(stage.index, microbatch)
        compute = stage.backward_full if full else stage.backward_input
        sent: Values | None = None
        if self.failure is None:
            sent = self._attempt(action, lambda: compute(microbatch, gradients))
        if full:
            self._report_weights(stage.index, microbatch)
        if stage.index == 0:
            return
        if sent is None:
            plan = stage.plan(microbatch)
            received = plan.boundaries[stage.index].receives
            sent = {value: None for value in received if plan.spec(value).requires_grad}
        local = stage.index - 1 in self._local
        box = self._backward_inbox if local else self._backward_outbox
        box[(stage.index - 1, microbatch) if local else key] = sent

    def _announce_weights(self, stage: int, microbatch: int) -> None:
        if self._observer is not None:
            self._observer.weights_due(stage, microbatch)

    def _report_weights(self, stage: int, microbatch: int) -> None:
        if self._observer is not None:
            self._observer.weights_done(stage, microbatch)

    def _attempt(self, action: ActionBase, compute: Callable[[], Result]) -> Result | None:
        try:
            return compute()
        except Exception as error:
            self.failure = error
            self.failed_action = action
            self.failed_at = time.time()
            return None


def blank(spec: ValueSpec) -> Tensor:
    """What travels in the place of a value that was not computed, or of a gradient that is None."""
    return torch.zeros(spec.shape, dtype=spec.dtype, device=spec.device)
