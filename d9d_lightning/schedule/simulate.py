"""Clock a program under given costs: how long it takes, where ranks idle, how much they hold."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from d9d_lightning.schedule.actions import ActionBase, ActionKind
from d9d_lightning.schedule.check import check_program
from d9d_lightning.schedule.costs import UNIT_COSTS, Costs, StageCosts
from d9d_lightning.schedule.engine import Interval, run_in_order
from d9d_lightning.schedule.program import Program

__all__ = ["Idle", "Simulation", "TimedAction", "measure_orders", "simulate"]


@dataclass(frozen=True)
class Idle:
    """Time in which one rank does nothing.

    Attributes:
        head: Before its first action.
        inner: Between its actions.
        tail: After its last action.
    """

    head: float
    inner: float
    tail: float


TimedAction = tuple[int, ActionBase, float, float]
"""Rank, action, start, end."""


@dataclass(frozen=True)
class Simulation:
    """Outcome of :func:`simulate`.

    Attributes:
        program: What was run.
        costs: Costs, one number per stage.
        times: For every rank, (start, end) of each compute action.
        peak_activations: For every rank, the most it holds at once, in stage activations.
        optimizer_barrier: Time of the synchronisation before the optimizer step; None where there is none.
    """

    program: Program
    costs: StageCosts
    times: tuple[tuple[Interval, ...], ...]
    peak_activations: tuple[float, ...]
    optimizer_barrier: float | None = None

    @property
    def timeline(self) -> tuple[TimedAction, ...]:
        """Every compute action with its rank, start and end; by rank, then by time."""
        orders = self.program.compute_actions
        return tuple(
            (rank, action, start, end)
            for rank, (order, spans) in enumerate(zip(orders, self.times, strict=True))
            for action, (start, end) in zip(order, spans, strict=True)
        )

    @functools.cached_property
    def begin(self) -> float:
        """Start of the first action of all."""
        return min(spans[0][0] for spans in self.times)

    @functools.cached_property
    def end(self) -> float:
        """End of the last action of all."""
        return max(spans[-1][1] for spans in self.times)

    @property
    def span(self) -> float:
        """From the first start to the last end of all: the step with a barrier at both ends."""
        return self.end - self.begin

    @property
    def cost(self) -> float:
        """The longest that one rank takes from its first start to its last end: the step without a barrier."""
        return max(spans[-1][1] - spans[0][0] for spans in self.times)

    @functools.cached_property
    def work(self) -> tuple[float, ...]:
        """Time that each rank computes."""
        return tuple(sum(end - start for start, end in spans) for spans in self.times)

    @property
    def bubble_rate(self) -> float:
        """Share of ``span`` in which a rank idles, on average over ranks."""
        return self._idle_share(self.span)

    @property
    def bubble_rate_without_barrier(self) -> float:
        """Share of ``cost`` in which a rank idles, on average over ranks."""
        return self._idle_share(self.cost)

    @property
    def idle(self) -> tuple[Idle, ...]:
        """Idle time of each rank, within ``span``."""
        return tuple(
            Idle(spans[0][0] - self.begin, spans[-1][1] - spans[0][0] - work, self.end - spans[-1][1])
            for spans, work in zip(self.times, self.work, strict=True)
        )

    @property
    def critical_path(self) -> tuple[TimedAction, ...]:
        """Actions, first to last, none of which can be later or longer without the whole being longer."""
        return _trace_critical_path(self)

    @functools.cached_property
    def exposed_reduction(self) -> tuple[float, ...]:
        """For every rank, how long its gradient reduction goes on after its last action."""
        return tuple(self._exposed(rank) for rank in range(self.program.pp_size))

    @property
    def step_time(self) -> float:
        """Time of the whole step, with gradient reduction and, where there is one, the optimizer barrier."""
        ends = [spans[-1][1] + more for spans, more in zip(self.times, self.exposed_reduction, strict=True)]
        if self.optimizer_barrier is not None:
            return max(ends) - self.begin + self.optimizer_barrier
        return max(end - spans[0][0] for end, spans in zip(ends, self.times, strict=True))

    def _idle_share(self, whole: float) -> float:
        return 1.0 - sum(self.work) / (len(self.work) * whole) if whole > 0 else 0.0

    def _exposed(self, rank: int) -> float:
        ready: dict[int, float] = {}
        for action, (_, end) in zip(self.program.compute_actions[rank], self.times[rank], strict=True):
            ready |= {part.stage: end for part in action.parts if part.kind in (ActionKind.B, ActionKind.W)}
        stream = 0.0
        for stage, end in sorted(ready.items(), key=lambda item: item[1]):
            stream = max(stream, end) + self.costs.reduction[stage]
        return max(0.0, stream - self.times[rank][-1][1])


def simulate(program: Program, costs: Costs = UNIT_COSTS, *, check: bool = True) -> Simulation:
    """Run a program on the clock: every rank in order, every action as early as its inputs are there.

    Args:
        program: What to run.
        costs: Time and memory of the actions.
        check: Check the program first; leave it out only for programs that were checked before.

    Raises:
        ScheduleError: An action is missing, doubled or out of order; names it. Or costs for another number of stages.
        ScheduleDeadlockError: Names the blocked action of each rank.
    """
    if check:
        check_program(program)
    stage_costs = costs.for_stages(program.num_stages)
    times = run_in_order(
        program.compute_actions,
        dict(enumerate(program.stage_to_rank)),
        stage_costs.duration,
        stage_costs.communication,
    )
    peaks = tuple(_peak(order, stage_costs) for order in program.compute_actions)
    return Simulation(program, stage_costs, tuple(map(tuple, times)), peaks, costs.optimizer_barrier)


def measure_orders(
    orders: Sequence[Sequence[ActionBase]], stage_to_rank: Sequence[int], costs: StageCosts
) -> tuple[float, float, float]:
    """(span, cost, largest peak of held activations) of compute actions that are known to be whole and in order."""
    times = run_in_order(orders, dict(enumerate(stage_to_rank)), costs.duration, costs.communication)
    first, last = [spans[0][0] for spans in times], [spans[-1][1] for spans in times]
    cost = max(end - start for start, end in zip(first, last, strict=True))
    return max(last) - min(first), cost, max(_peak(order, costs) for order in orders)


def _peak(order: Sequence[ActionBase], costs: StageCosts) -> float:
    held = peak = 0.0
    for part in (part for action in order for part in action.parts):
        held += costs.memory_change(part)
        peak = max(peak, held)
    return round(peak, 9)


def _trace_critical_path(simulation: Simulation) -> tuple[TimedAction, ...]:
    ends: dict[tuple[bool, int, int], tuple[int, int]] = {}
    orders, times = simulation.program.compute_actions, simulation.times
    for rank, order in enumerate(orders):
        for position, action in enumerate(order):
            for part in action.parts:
                if part.kind is not ActionKind.W:
                    ends[part.kind is ActionKind.F, part.stage, part.microbatch] = (rank, position)
    here = max(((spans[-1][1], rank, len(spans) - 1) for rank, spans in enumerate(times)), key=lambda item: item[0])[1:]
    path: list[tuple[int, int]] = [here]
    while times[here[0]][here[1]][0] > simulation.begin + 1e-12:
        before = _binding_predecessor(simulation, ends, here)
        if before is None:
            break
        path.append(here := before)
    return tuple((rank, orders[rank][at], *times[rank][at]) for rank, at in reversed(path))


def _binding_predecessor(
    simulation: Simulation, ends: dict[tuple[bool, int, int], tuple[int, int]], here: tuple[int, int]
) -> tuple[int, int] | None:
    """The action whose end lets the one at ``here`` start when it does."""
    rank, position = here
    program, times = simulation.program, simulation.times
    start = times[rank][position][0]
    sources = [(rank, position - 1, 0.0)] if position else []
    for part in program.compute_actions[rank][position].parts:
        is_forward = part.kind is ActionKind.F
        source = ends.get((is_forward, part.stage + (-1 if is_forward else 1), part.microbatch))
        if source is not None and part.kind is not ActionKind.W:
            sources.append((*source, 0.0 if source[0] == rank else simulation.costs.communication))
    slack = 1e-9 * max(1.0, abs(start))
    return next(((r, at) for r, at, latency in sources if abs(times[r][at][1] + latency - start) <= slack), None)
