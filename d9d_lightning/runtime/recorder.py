"""Notes when each action of a step begins and ends. Cheap enough to stay on: two clock readings and one append.

Time spent waiting for a peer is noted apart from the action that waited, so that what remains is what the action costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from d9d_lightning.schedule import ActionBase

__all__ = ["ActionRunner", "RecordedTransport", "Span", "StepRecord", "StepRecorder"]


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


class ActionRunner(Protocol):
    """The executor, as far as recording needs it."""

    actions: Sequence[ActionBase]

    def execute(self, action: ActionBase) -> None:
        """Run one action."""


class RecordedTransport:
    """A transport that notes how long its owner waits for tensors, and otherwise is the one it wraps."""

    def __init__(self, transport: Any) -> None:
        self.waited = 0.0
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
        self._wait_for(self._transport.finish)

    def _wait_for(self, call: Callable[..., Any], *arguments: int) -> Any:
        start = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            self.waited += time.perf_counter() - start


class StepRecorder:
    """Runs programs in the executor's place and keeps the record of the latest step.

    Use::

        transport = RecordedTransport(transport)
        recorder.run(PipelineExecutor(rank, program, stages, transport), transport)
        recorder.latest.spans

    Ranks of one machine share a clock; across machines the records are as far apart as the machines' clocks.

    Attributes:
        latest: Record of the last step that ended without an error, or None.
    """

    def __init__(self, rank: int) -> None:
        self.latest: StepRecord | None = None
        self._rank = rank

    def run(self, executor: ActionRunner, transport: RecordedTransport) -> StepRecord:
        """Run all actions, wait for the last sends, and note the time of each."""
        clock = time.perf_counter
        since_epoch = time.time() - clock()
        notes: list[tuple[ActionBase, float, float, float]] = []
        before = transport.waited
        start = clock()
        for action in executor.actions:
            executor.execute(action)
            end, waited = clock(), transport.waited
            notes.append((action, start, end, waited - before))
            start, before = end, waited
        transport.finish()
        spans = tuple(
            Span(str(action), start + since_epoch, end + since_epoch, wait) for action, start, end, wait in notes
        )
        self.latest = StepRecord(self._rank, spans, transport.waited - before)
        return self.latest
