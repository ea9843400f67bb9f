"""Traces of further signatures do less than the first one, and find the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from d9d_lightning.stage.planner import Planner
from d9d_lightning.values import Microbatch, Trace


class Counting(nn.Module):
    """Counts its steps in plain state that no unit owns."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(layers))
        self.steps = 0
        self.seen: list[Any] = []
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        self.ready = True
        self.steps += 1
        self.seen.append(len(x))
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def batch(rows: int) -> Microbatch:
    return Microbatch(0, rows, (torch.ones(rows, 4),))


def step_of(root: nn.Module) -> Any:
    return lambda microbatch: root(*microbatch.args)


def without_flops(trace: Trace) -> list[Any]:
    return [dataclasses.replace(call, flops=0, effects=None) for call in trace.calls]  # type: ignore[arg-type]


def test_a_retrace_finds_what_a_first_trace_finds() -> None:
    """A plan of a new number of rows is that of a planner which saw nothing before, and only placements count work."""
    root = Counting()
    planner, fresh = Planner(root), Planner(root)
    planner.place(step_of(root), batch(3), (0, 1, 2))
    fresh.place(step_of(root), batch(5), (0, 1, 2))
    again = planner.plan(step_of(root), planner.describe("training_step", [batch(5)])[0])
    first = fresh.setup_trace
    assert again.placement == fresh.placement
    assert without_flops(again.trace) == without_flops(first)
    assert (again.trace.tail_needs, again.trace.changed_state) == (first.tail_needs, first.changed_state)
    assert all(call.flops > 0 for call in first.calls) and not any(call.flops for call in again.trace.calls)


def test_a_trace_leaves_only_what_happens_once() -> None:
    """What the first run alone changes stays; counters, lists and buffers are as before, and so are their objects."""
    root = Counting()
    seen, buffers = root.seen, dict(root.named_buffers())
    trace = Planner(root).trace(step_of(root), batch(3))
    assert root.ready and (root.steps, root.seen) == (0, []) and root.seen is seen
    assert set(trace.changed_state) == {"steps", "seen"}
    assert all(buffer is buffers[name] for name, buffer in root.named_buffers())
    assert all(int(layer[1].num_batches_tracked) == 0 for layer in root.layers)  # type: ignore[index]


def test_a_rank_that_needed_no_values_starts_again_with_the_others() -> None:
    """Where another rank's trace with shapes fails, this one's leaves nothing behind before both take values."""
    root = Counting()
    planner = Planner(root)
    planner.agree = lambda failed: True
    trace = planner.trace(step_of(root), batch(3))
    assert root.ready and (root.steps, root.seen) == (0, [])
    assert set(trace.changed_state) == {"steps", "seen"}


def test_a_trace_that_fails_leaves_nothing_behind() -> None:
    """An error of the step comes out, and the module is what it was."""
    root = Counting()

    def step(microbatch: Microbatch) -> Tensor:
        root(*microbatch.args)
        raise ArithmeticError

    try:
        Planner(root).trace(step, batch(3))
    except ArithmeticError:
        assert not root.ready and (root.steps, root.seen) == (0, [])
    else:
        raise AssertionError("the step's error was lost")
