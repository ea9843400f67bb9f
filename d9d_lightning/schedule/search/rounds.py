"""The automatic schedule of the zero bubble paper for one stage per rank, as a source of good orders.

Written from the description in Qi et al., arXiv 2401.10241, section 4.3: fill the time until the first input gradient
with forwards, then go round by round, one forward and one input gradient on every rank.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from d9d_lightning.schedule.search.problem import EPSILON, OrderProblem
from d9d_lightning.schedule.search.weave import WeaveOrder

__all__ = ["propose_rounds"]


def propose_rounds(problem: OrderProblem) -> Iterator[WeaveOrder]:
    """Whole orders of the eight combinations of the paper's three choices, and two with a shorter warm-up.

    One stage per rank only.
    """
    for overshoot, skip, eager in itertools.product((False, True), repeat=3):
        yield _Rounds(problem, overshoot, skip, eager).build()
    for eager in (False, True):
        yield _Rounds(problem, False, False, eager, two_per_rank=True).build()


class _Rounds:
    """Clock, memory and idle time of every rank while the order grows.

    Args:
        problem: One stage per rank.
        overshoot: A forward may end after the first input gradient has arrived.
        skip: A rank that is ahead of the next one may leave out a forward to avoid a delay.
        eager: A weight gradient may always delay an input.
        two_per_rank: At most two forwards ahead for each rank that follows, and one.
    """

    def __init__(
        self, problem: OrderProblem, overshoot: bool, skip: bool, eager: bool, two_per_rank: bool = False
    ) -> None:
        self.problem, self.overshoot, self.skip, self.eager = problem, overshoot, skip, eager
        self.two_per_rank = two_per_rank
        self.ranks, self.count = problem.num_ranks, problem.num_microbatches
        self.time = (problem.costs.times[0], problem.costs.times[2], problem.costs.times[3])
        self.size = problem.costs.activation
        self.kept = [share * size for share, size in zip(problem.costs.held, self.size, strict=True)]
        self.limit = problem.limit + EPSILON
        self.hop = problem.costs.communication
        self.now = [0.0] * self.ranks
        self.memory = [0.0] * self.ranks
        self.idle = [0.0] * self.ranks
        self.done = [[0] * self.ranks for _ in range(3)]
        self.ends: list[list[list[float]]] = [[[] for _ in range(self.ranks)] for _ in range(2)]
        self.orders: WeaveOrder = [[] for _ in range(self.ranks)]

    def build(self) -> WeaveOrder:
        for rank in range(self.ranks):
            self._put(rank, 0, self._forward_ready(rank))
        extra = self._count_extra_forwards()
        for rank in range(self.ranks):
            for _ in range(extra[rank]):
                self._put(rank, 0, self._forward_ready(rank))
        for rank in reversed(range(self.ranks)):
            self._put(rank, 1, self._input_ready(rank))
        while self.done[1][0] < self.count:
            self._run_round()
        for rank in range(self.ranks):
            while self._late(rank):
                self._put(rank, 2, self.now[rank])
        return self.orders

    def _count_extra_forwards(self) -> list[int]:
        """Forwards that fit before the first input gradient, fewer on each following rank."""
        extra = [0] * self.ranks
        reached = self.now[-1] + self.time[1][-1]
        for rank in reversed(range(self.ranks - 1)):
            arrival, clock = reached + self.hop, self.now[rank]
            forward, size = self.time[0][rank], self.size[rank]
            while (extra[rank] + 2) * size <= self.limit and extra[rank] + 1 < self.count:
                if clock + forward > arrival + EPSILON and not (self.overshoot and clock < arrival - EPSILON):
                    break
                clock += forward
                extra[rank] += 1
            if self.two_per_rank:
                extra[rank] = min(extra[rank], 2 * (self.ranks - 1 - rank) + 1)
            reached = max(arrival, clock) + self.time[1][rank]
        for rank in range(1, self.ranks):
            extra[rank] = min(extra[rank], max(0, extra[rank - 1] - 1))
        return extra

    def _run_round(self) -> None:
        forwards = self._choose_forwards()
        for rank in range(self.ranks):
            behind = rank > 0 and self.done[0][rank - 1] <= self.done[0][rank]
            fits = self.memory[rank] + self.size[rank] - self.kept[rank] * self._late(rank) <= self.limit
            if forwards[rank] and not behind and fits:
                ready = self._forward_ready(rank)
                self._weave(rank, ready, self.size[rank])
                self._put(rank, 0, ready)
        for rank in reversed(range(self.ranks)):
            behind = rank < self.ranks - 1 and self.done[1][rank + 1] <= self.done[1][rank]
            if self.done[1][rank] >= self.done[0][rank] or behind:
                continue
            ready = self._input_ready(rank)
            if rank == 0 and self.done[0][0] == self.count:
                while self._late(0):
                    self._put(0, 2, self.now[0])
            else:
                self._weave(rank, ready, self.kept[rank] - self.size[rank])
            self._put(rank, 1, ready)

    def _choose_forwards(self) -> list[bool]:
        """Which ranks run a forward in this round; one that skips makes all before it skip."""
        wanted = [done < self.count for done in self.done[0]]
        skipping = False
        for rank in reversed(range(self.ranks - 1)) if self.skip else ():
            skipping = skipping or (wanted[rank] and self._should_skip(rank))
            wanted[rank] = wanted[rank] and not skipping
        return wanted

    def _should_skip(self, rank: int) -> bool:
        if self.done[0][rank] - self.done[0][rank + 1] < 2:
            return False
        memory, weights = self.memory[rank] + self.size[rank], 0
        while memory > self.limit and weights < self._late(rank):
            memory -= self.kept[rank]
            weights += 1
        end = max(self.now[rank], self._forward_ready(rank)) + self.time[0][rank] + weights * self.time[2][rank]
        arrival = self.now[rank + 1] + self.time[0][rank + 1] + self.time[1][rank + 1] + self.hop
        idle = max(0.0, arrival - self.now[rank] - self._late(rank) * self.time[2][rank])
        return end > arrival + EPSILON and idle <= max(self.idle) - self.idle[rank] + EPSILON

    def _weave(self, rank: int, ready: float, growth: float) -> None:
        """Weight gradients before an action whose input is there at ``ready``."""
        weight = self.time[2][rank]
        while self._late(rank) and self.memory[rank] + growth > self.limit:
            self._put(rank, 2, self.now[rank])
        while self._late(rank) and self.now[rank] + weight <= ready + EPSILON:
            self._put(rank, 2, self.now[rank])
        gap = ready - self.now[rank]
        slack = max(self.idle) - self.idle[rank]
        if self._late(rank) and gap > EPSILON and (self.eager or gap > slack + EPSILON):
            self._put(rank, 2, self.now[rank])

    def _put(self, rank: int, kind: int, ready: float) -> None:
        start = max(self.now[rank], ready)
        if self.done[0][rank]:
            self.idle[rank] += start - self.now[rank]
        end = self.now[rank] = start + self.time[kind][rank]
        self.done[kind][rank] += 1
        self.memory[rank] += (self.size[rank], self.kept[rank] - self.size[rank], -self.kept[rank])[kind]
        if kind < 2:
            self.ends[kind][rank].append(end)
        self.orders[rank].append((kind, rank))

    def _late(self, rank: int) -> int:
        return self.done[1][rank] - self.done[2][rank]

    def _forward_ready(self, rank: int) -> float:
        return 0.0 if rank == 0 else self.ends[0][rank - 1][self.done[0][rank]] + self.hop

    def _input_ready(self, rank: int) -> float:
        if rank == self.ranks - 1:
            return self.now[rank]
        return self.ends[1][rank + 1][self.done[1][rank]] + self.hop
