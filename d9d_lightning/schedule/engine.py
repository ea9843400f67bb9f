"""The clock: runs the compute actions of all ranks in order and says when each one starts and ends.

Every rank takes its own actions in order, each as early as its inputs allow. One engine serves the communication
pass, the checker and the simulator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from d9d_lightning.errors import ScheduleDeadlockError
from d9d_lightning.schedule.actions import ActionBase, ActionKind

__all__ = ["Interval", "run_in_order"]

Interval = tuple[float, float]


class _Clock:
    """End times of what has run so far, and who waits for what has not."""

    def __init__(self, stage_to_rank: Mapping[int, int], latency: float) -> None:
        self.num_stages = len(stage_to_rank)
        self.rank_of = [stage_to_rank[stage] for stage in range(self.num_stages)]
        self.latency = latency
        self.forward: dict[tuple[int, int], float] = {}
        self.backward: dict[tuple[int, int], float] = {}
        self.waiting: dict[tuple[int, int, int], list[int]] = {}

    def missing(self, part: ActionBase) -> tuple[int, int, int] | None:
        """First input of a compute action that does not exist yet, as (0 forward | 1 backward, stage, microbatch)."""
        stage, microbatch, kind = part.stage, part.microbatch, part.kind
        if kind is ActionKind.F:
            return None if stage == 0 or (stage - 1, microbatch) in self.forward else (0, stage - 1, microbatch)
        if kind is ActionKind.W:
            return None if (stage, microbatch) in self.backward else (1, stage, microbatch)
        if (stage, microbatch) not in self.forward:
            return (0, stage, microbatch)
        if stage == self.num_stages - 1 or (stage + 1, microbatch) in self.backward:
            return None
        return (1, stage + 1, microbatch)

    def ready_at(self, part: ActionBase) -> float:
        """When the inputs of a compute action have arrived on its rank."""
        stage, microbatch = part.stage, part.microbatch
        if part.kind is ActionKind.F and stage > 0:
            source, produced = stage - 1, self.forward[stage - 1, microbatch]
        elif part.kind in (ActionKind.I, ActionKind.B) and stage < self.num_stages - 1:
            source, produced = stage + 1, self.backward[stage + 1, microbatch]
        else:
            return -math.inf
        return produced if self.rank_of[source] == self.rank_of[stage] else produced + self.latency

    def finish(self, part: ActionBase, end: float) -> list[int]:
        """Record an end; returns the ranks that waited for it."""
        if part.kind is ActionKind.W:
            return []
        which = 0 if part.kind is ActionKind.F else 1
        (self.forward if which == 0 else self.backward)[part.stage, part.microbatch] = end
        return self.waiting.pop((which, part.stage, part.microbatch), [])


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
            parts = action.parts
            blocked = next((need for part in parts if (need := clock.missing(part)) is not None), None)
            if blocked is not None:
                clock.waiting.setdefault(blocked, []).append(rank)
                break
            start = max(now[rank], *(clock.ready_at(part) for part in parts))
            end = now[rank] = start + duration(action)
            done.append((start, end))
            for part in parts:
                runnable.extend(clock.finish(part, end))
    _require_all_done(orders, times, clock)
    return times


def _require_all_done(
    orders: Sequence[Sequence[ActionBase]], times: Sequence[Sequence[Interval]], clock: _Clock
) -> None:
    blocked = []
    for rank, (order, done) in enumerate(zip(orders, times, strict=True)):
        if len(done) < len(order):
            action = order[len(done)]
            needs = [need for part in action.parts if (need := clock.missing(part)) is not None]
            wanted = ", ".join(f"{stage}{'FB'[which]}{microbatch}" for which, stage, microbatch in needs)
            blocked.append(f"rank {rank} is blocked at {action} (waits for {wanted})")
    if blocked:
        raise ScheduleDeadlockError("the program deadlocks: " + "; ".join(blocked))
