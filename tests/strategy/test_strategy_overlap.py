"""When gradients leave: inside the schedule, before the work of the other stage of a rank is over."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import lightning as L
import pytest

from d9d_lightning.gradients import SyncGradientBucket
from d9d_lightning.stage import PipelineStage
from d9d_lightning.testing import run_distributed
from tests.strategy.replicated_cases import replicated, train

Event = tuple[str, Any]


def listen(events: list[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    """Note the beginning and end of all weight actions, and what every bucket holds when it leaves."""
    launch = SyncGradientBucket.launch

    def launched(bucket: SyncGradientBucket) -> None:
        events.append(("leave", frozenset(slot.name for slot in bucket.slots)))
        launch(bucket)

    monkeypatch.setattr(SyncGradientBucket, "launch", launched)
    for name in ("backward_weight", "backward_full"):
        inner = getattr(PipelineStage, name)

        def compute(stage: PipelineStage, *args: Any, inner: Any = inner) -> Any:
            events.append(("begin", stage.index))
            result = inner(stage, *args)
            events.append(("end", stage.index))
            return result

        monkeypatch.setattr(PipelineStage, name, compute)


class Marks(L.Callback):
    """Notes where a batch begins."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.events.append(("step", batch_idx))


def record(schedules: list[str]) -> dict[str, list[list[Event]]]:
    """Events of every step after the first, in which the order of buckets is learned."""
    found = {}
    for schedule in schedules:
        events: list[Event] = []
        with pytest.MonkeyPatch.context() as monkeypatch:
            listen(events, monkeypatch)
            train(replicated(schedule=schedule, num_microbatches=4), 4, 2, callbacks=[Marks(events)])
        starts = [i for i, event in enumerate(events) if event[0] == "step"] + [len(events)]
        found[schedule] = [events[begin:end] for begin, end in pairwise(starts[1:])]
    return found


def last(step: list[Event], event: Event) -> int:
    return max(index for index, other in enumerate(step) if other == event)


def leaves(step: list[Event]) -> list[tuple[int, frozenset[str]]]:
    return [(index, event[1]) for index, event in enumerate(step) if event[0] == "leave"]


@pytest.mark.filterwarnings("ignore")
def test_gradients_leave_while_the_schedule_runs() -> None:
    """In a V, one stage's gradients leave before the other's last weights begin; elsewhere inside the last backward."""
    v, straight = ["zbv", "v_half"], ["zb_h1"]
    for rank in run_distributed(record, 4, ([*v, *straight],), timeout=120):
        for schedule, steps in rank.items():
            assert len(steps) == 2, schedule
            for step in steps:
                stages = sorted({number for what, number in step if what == "begin"})
                ends = {stage: last(step, ("end", stage)) for stage in stages}
                begins = {stage: last(step, ("begin", stage)) for stage in stages}
                early = min(index for index, _ in leaves(step))
                if schedule in v:
                    first, second = sorted(stages, key=ends.__getitem__)
                    assert early < begins[second], (schedule, step)
                    assert begins[first] < early, (schedule, step)
                else:
                    assert begins[stages[0]] < early < ends[stages[0]], (schedule, step)
                names = [names for _, names in leaves(step)]
                assert len(frozenset().union(*names)) == sum(map(len, names)), "a parameter left twice"
