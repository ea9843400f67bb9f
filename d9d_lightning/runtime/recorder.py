"""Notes when each action of a step begins and ends. Cheap enough to stay on: two clock readings and one append.

Time spent waiting for a peer is noted apart from the action that waited, so that what remains is what the action costs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from d9d_lightning.runtime.executor import Monitor
from d9d_lightning.schedule import ActionBase, ActionKind, Program

__all__ = ["RecordedTransport", "Span", "StepRecord", "StepRecorder"]


@dataclass(frozen=True, slots=True)
class Span:
    """One action as it happened. Times are in seconds.

    Attributes:
        action: Text of the action, for example ``2F0``.
        start: When it began, since the epoch.
        end: When it ended.
        wait: How long it waited for tensors of another rank in between.
    """

    action: str
    start: float
    end: float
    wait: float

    @property
    def work(self) -> float:
        """Time that the action took without its wait."""
        return self.end - self.start - self.wait


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one rank did in one step.

    Attributes:
        rank: Rank in the pipeline.
        spans: The actions in order.
        final_wait: Seconds spent at the end, until everything sent had left.
    """

    rank: int
    spans: tuple[Span, ...]
    final_wait: float = 0.0


class RecordedTransport:
    """A transport that notes how long its owner waits for tensors, and otherwise is the one it wraps.

    Attributes:
        waited: Seconds of all waits.
        final_wait: Seconds of the wait at the end, until everything sent had left.
        problem: What makes the step fail although every action ran; known at the end.
        receives_ahead: As the wrapped transport has it.
    """

    def __init__(self, transport: Any) -> None:
        self.waited = 0.0
        self.final_wait = 0.0
        self.problem: Exception | None = None
        self.receives_ahead: int = transport.receives_ahead
        self._transport = transport
        # bound once: sends are on the path of every action
        self.send_forward: Callable[[int, int, Mapping[Any, Any]], None] = transport.send_forward
        self.send_backward: Callable[[int, int, Mapping[Any, Any]], None] = transport.send_backward
        self.post_forward: Callable[[int, int], None] = transport.post_forward
        self.post_backward: Callable[[int, int], None] = transport.post_backward

    def take_forward(self, stage: int, microbatch: int) -> dict[Any, Any]:
        """Wait for the inputs of a stage."""
        return self._wait_for(self._transport.take_forward, stage, microbatch)  # type: ignore[no-any-return]

    def take_backward(self, stage: int, microbatch: int) -> dict[Any, Any]:
        """Wait for the gradients of a stage's outputs."""
        return self._wait_for(self._transport.take_backward, stage, microbatch)  # type: ignore[no-any-return]

    def finish(self) -> None:
        """Wait until everything sent has left."""
        before = self.waited
        self._wait_for(self._transport.finish)
        self.final_wait += self.waited - before
        self.problem = self._transport.problem

    def _wait_for(self, call: Callable[..., Any], *arguments: int) -> Any:
        start = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            self.waited += time.perf_counter() - start


class StepRecorder:
    """Stands between the executor and its monitor and transport, and keeps the records of the latest steps.

    Use::

        transport = recorder.begin(transport, monitor)
        PipelineExecutor(rank, program, stages, transport).run(recorder)
        recorder.end(program)

    Ranks of one machine share a clock; across machines the records are as far apart as the machines' clocks.

    Args:
        rank: Rank in the pipeline.
        keep: Number of steps to keep.
    """

    def __init__(self, rank: int, keep: int = 8) -> None:
        self._rank = rank
        self._steps: deque[_Step] = deque(maxlen=keep)
        self._monitor: Monitor | None = None
        self._transport: RecordedTransport | None = None
        self._notes: list[_Note] = []
        self._action: Any = None
        self._start = self._before = 0.0

    def begin(self, transport: Any, monitor: Monitor | None = None) -> RecordedTransport:
        """A step begins; gives the transport to run it with. Pass the recorder itself as the executor's monitor."""
        self._monitor = monitor
        self._notes = []
        self._transport = RecordedTransport(transport)
        return self._transport

    def enter(self, action: object) -> None:
        """An action begins."""
        if self._monitor is not None:
            self._monitor.enter(action)
        self._action = action
        self._before = self._transport.waited if self._transport is not None else 0.0
        self._start = time.perf_counter()

    def leave(self) -> None:
        """It ended."""
        end = time.perf_counter()
        waited = self._transport.waited if self._transport is not None else 0.0
        self._notes.append((self._action, self._start, end, waited - self._before))
        if self._monitor is not None:
            self._monitor.leave()

    def report(self, error: BaseException) -> None:
        """This rank has failed."""
        if self._monitor is not None:
            self._monitor.report(error)

    def end(self, program: Program) -> None:
        """The step went well; it is kept if it had a backward."""
        if program.compute_actions[self._rank][-1].kind is ActionKind.F:
            return
        transport = self._transport
        final_wait = 0.0 if transport is None else transport.final_wait
        self._steps.append(_Step(program, self._notes, final_wait, time.time() - time.perf_counter()))
        self._notes = []
        self._transport = None

    @property
    def program(self) -> Program | None:
        """Program of the latest step that went well."""
        return self._steps[-1].program if self._steps else None

    @property
    def latest(self) -> StepRecord | None:
        """Record of the latest step that went well."""
        return self._record(self._steps[-1]) if self._steps else None

    def records_of(self, program: Program) -> tuple[StepRecord, ...]:
        """Records of the latest steps that ran a program, oldest first."""
        return tuple(self._record(step) for step in self._steps if step.program is program)

    def _record(self, step: _Step) -> StepRecord:
        spans = tuple(
            Span(str(action), start + step.since_epoch, end + step.since_epoch, wait)
            for action, start, end, wait in step.notes
        )
        return StepRecord(self._rank, spans, step.final_wait)


_Note = tuple[ActionBase, float, float, float]
"""Action, start, end, wait in between."""


@dataclass(frozen=True, slots=True)
class _Step:
    """What is noted of a step; texts are made when somebody asks."""

    program: Program
    notes: list[_Note]
    final_wait: float
    since_epoch: float
