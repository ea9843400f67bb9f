"""The clock: runs the compute actions of all ranks in order and says when each one starts and ends.

Every rank takes its own actions in order, each as early as its inputs allow. One engine serves the communication
pass, the checker and the simulator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from d9d_lightning.errors import ScheduleDeadlockError
from d9d_lightning.schedule.actions import ActionBase, ActionKind

__all__ = ["Interval", "run_in_order"]

Interval = tuple[float, float]


class _Clock:
    """End times of what has run so far, and who waits for what has not.

    Results are kept by row: ``2 * stage`` for forwards, ``2 * stage + 1`` for (full or input) backwards; in a row by
    microbatch.
    """

    def __init__(self, stage_to_rank: Mapping[int, int], latency: float) -> None:
        last = len(stage_to_rank) - 1
        self.rows: list[dict[int, float]] = [{} for _ in range(2 * last + 2)]
        self.sources: list[tuple[int, float]] = []
        for stage in range(last + 1):
            for near, row in ((stage - 1, 2 * stage - 2), (stage + 1, 2 * stage + 3)):
                if 0 <= near <= last:
                    self.sources.append((row, 0.0 if stage_to_rank[near] == stage_to_rank[stage] else latency))
                else:
                    self.sources.append((2 * stage if near > last else -1, 0.0))
        self.waiting: dict[tuple[int, int], list[int]] = {}

    def needs(self, part: ActionBase) -> tuple[int, float]:
        """Row of the result that a compute action needs (-1: none), and the latency of its way."""
        if part.kind is ActionKind.W:
            return 2 * part.stage + 1, 0.0
        return self.sources[2 * part.stage + (part.kind is not ActionKind.F)]

    def find_arrival(self, action: ActionBase, rank: int) -> float | None:
        """When all inputs of an action are on its rank; None, and the rank is noted as waiting, if one is missing."""
        latest = 0.0
        for part in action.parts:
            row, way = self.needs(part)
            if row >= 0:
                end = self.rows[row].get(part.microbatch)
                if end is None:
                    self.waiting.setdefault((row, part.microbatch), []).append(rank)
                    return None
                # A weight gradient comes after its input gradient on the same rank; ends only grow there.
                latest = max(latest, end + way)
        return latest

    def finish(self, action: ActionBase, end: float) -> list[int]:
        """Record an end; returns the ranks that waited for it."""
        woken: list[int] = []
        for part in action.parts:
            if part.kind is not ActionKind.W:
                row = 2 * part.stage + (part.kind is not ActionKind.F)
                self.rows[row][part.microbatch] = end
                if self.waiting:
                    woken += self.waiting.pop((row, part.microbatch), ())
        return woken


def run_in_order(
    orders: Sequence[Sequence[ActionBase]],
    stage_to_rank: Mapping[int, int],
    duration: Callable[[ActionBase], float],
    latency: float = 0.0,
) -> list[list[Interval]]:
    """Clock every compute action.

    Args:
        orders: Compute actions of every rank, in order.
        stage_to_rank: Rank of every stage.
        duration: Time that an action takes.
        latency: Time of one hop between two ranks; nothing inside a rank.

    Returns:
        For every rank, (start, end) of each of its actions.

    Raises:
        ScheduleDeadlockError: Ranks wait for each other; names the blocked action of each rank.
    """
    clock = _Clock(stage_to_rank, latency)
    times: list[list[Interval]] = [[] for _ in orders]
    now = [0.0] * len(orders)
    runnable = list(range(len(orders)))[::-1]
    while runnable:
        rank = runnable.pop()
        order, done = orders[rank], times[rank]
        while len(done) < len(order):
            action = order[len(done)]
            arrival = clock.find_arrival(action, rank)
            if arrival is None:
                break
            start = max(now[rank], arrival)
            end = now[rank] = start + duration(action)
            done.append((start, end))
            runnable += clock.finish(action, end)
    _require_all_done(orders, times, clock)
    return times


def _require_all_done(
    orders: Sequence[Sequence[ActionBase]], times: Sequence[Sequence[Interval]], clock: _Clock
) -> None:
    blocked = []
    for rank, (order, done) in enumerate(zip(orders, times, strict=True)):
        if len(done) < len(order):
            action = order[len(done)]
            needs = [(clock.needs(part)[0], part.microbatch) for part in action.parts]
            missing = [(row, i) for row, i in needs if row >= 0 and i not in clock.rows[row]]
            wanted = ", ".join(f"{row // 2}{'FB'[row % 2]}{i}" for row, i in missing)
            blocked.append(f"rank {rank} is blocked at {action} (waits for {wanted})")
    if blocked:
        raise ScheduleDeadlockError("the program deadlocks: " + "; ".join(blocked))
