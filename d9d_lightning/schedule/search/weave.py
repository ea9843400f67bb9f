"""Weight gradients have no successors, so they need no search: they go where a rank would wait or run out of memory.

Given the order of forwards and input gradients of every rank, the weaver clocks them and puts the weight gradients,
oldest first, (1) before a forward that would not fit in memory, (2) into a gap before an input arrives if they fit,
(3) into a gap that is too short, but only if the rank has idled more than it is allowed to, and (4) at the end.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from d9d_lightning.schedule.actions import ActionBase, backward_input, backward_weight, forward
from d9d_lightning.schedule.search.problem import EPSILON, OrderProblem, Sequences

__all__ = ["Score", "WeaveOrder", "Weaver", "to_actions"]

Score = tuple[float, float]
"""The makespan that counts, and the sum of squares over ranks, which tells plateaus apart."""

WeaveOrder = list[list[tuple[int, int]]]
"""For every rank (0 forward | 1 input gradient | 2 weight gradient, stage), in order."""


_NOTHING = (0, 1 << 60)
"""What a rank waits for that waits for nothing: more ends than there will ever be."""


class Weaver:
    """Clocks orders of one problem. Not thread-safe: it keeps its working arrays."""

    def __init__(self, problem: OrderProblem) -> None:
        self.problem = problem
        forward, _, inputs, self._weight_time = problem.costs.times
        stages = range(problem.num_stages)
        self._time = [time for stage in stages for time in (forward[stage], inputs[stage])]
        size, held = problem.costs.activation, problem.costs.held
        self._weight_size = [held[stage] * size[stage] for stage in stages]
        self._change = [change for s in stages for change in (size[s], (held[s] - 1.0) * size[s])]
        last = problem.num_stages - 1
        self._source = [code for s in stages for code in (2 * s - 2, 2 * s + 3 if s < last else 2 * s)]
        rank_of = problem.rank_of
        self._hop = [
            problem.costs.communication if source >= 0 and rank_of[source >> 1] != rank_of[code >> 1] else 0.0
            for code, source in enumerate(self._source)
        ]
        self._neighbours = [
            sorted({rank_of[near] for s in own for near in (s - 1, s + 1) if 0 <= near <= last} - {rank}, reverse=True)
            for rank, own in enumerate(problem.stages_of)
        ]
        self._record: WeaveOrder | None = None

    def score(self, sequences: Sequences, allowance: Sequence[float], worst: float = math.inf) -> Score | None:
        """Clock an order.

        Where a forward does not fit in memory and no weight gradient is left to make room, the next input gradient is
        moved before it; the repaired row replaces the one in ``sequences``.

        Args:
            sequences: Forwards and input gradients of every rank; the outer list may change.
            allowance: For every rank, how long it may idle before a weight gradient may make an input wait.
            worst: Give up once the makespan is sure to be longer than this.

        Returns:
            The score, or None if the order deadlocks, does not fit in memory, or is worse than ``worst``.
        """
        self._reset(sequences)
        stack = list(reversed(range(self.problem.num_ranks)))
        worst += EPSILON
        while stack:
            rank = stack.pop()
            if not self._advance(rank, sequences, allowance[rank]):
                return None
            start = self._first[rank] if self.problem.barrier else 0.0
            if start + self._idle[rank] + self.problem.work[rank] > worst:
                return None
            for neighbour in self._neighbours[rank]:
                needed, count = self._blocked[neighbour]
                if len(self._ends[needed]) > count:
                    self._blocked[neighbour] = _NOTHING
                    stack.append(neighbour)
        if any(at < len(sequence) for at, sequence in zip(self._at, sequences, strict=True)):
            return None
        return self._finish()

    def orders(self, sequences: Sequences, allowance: Sequence[float]) -> WeaveOrder:
        """The whole order, weight gradients included, of sequences that :meth:`score` accepts."""
        record: WeaveOrder = [[] for _ in sequences]
        self._record = record
        self.score(sequences[:], allowance)
        self._record = None
        return record

    def _reset(self, sequences: Sequences) -> None:
        ranks = self.problem.num_ranks
        self._ends: list[list[float]] = [[] for _ in self._time]
        self._at, self._now, self._memory = [0] * ranks, [0.0] * ranks, [0.0] * ranks
        self._idle, self._first = [0.0] * ranks, [-1.0] * ranks
        self._late: list[list[int]] = [[] for _ in sequences]
        self._woven = [0] * ranks
        self._blocked = [_NOTHING] * ranks

    def _advance(self, rank: int, sequences: Sequences, allowed: float) -> bool:
        """Run a rank until it waits for another one; false if it runs out of memory."""
        sequence = sequences[rank]
        ends, source, hop, time, change = self._ends, self._source, self._hop, self._time, self._change
        at, now, memory = self._at[rank], self._now[rank], self._memory[rank]
        late, size, limit = self._late[rank], len(sequence), self.problem.limit + EPSILON
        while at < size:
            code = sequence[at]
            done, ready = ends[code], now
            if (needs := source[code]) >= 0:
                produced = ends[needs]
                if len(done) >= len(produced):
                    self._blocked[rank] = (needs, len(done))
                    break
                ready = produced[len(done)] + hop[code]
            if not code & 1 and memory + change[code] > limit:
                now, memory = self._make_room(rank, now, memory, limit - change[code])
                if memory + change[code] > limit:
                    if (repaired := _bring_backward_before(sequence, at)) is None:
                        return False
                    sequence = sequences[rank] = repaired
                    continue
            if ready > now:
                now, memory = self._fill_gap(rank, now, memory, ready, allowed)
            elif self._first[rank] < 0:
                self._first[rank] = now
            if self._record is not None:
                self._record[rank].append((code & 1, code >> 1))
            now += time[code]
            done.append(now)
            memory += change[code]
            if code & 1:
                late.append(code >> 1)
            at += 1
        self._at[rank], self._now[rank], self._memory[rank] = at, now, memory
        return True

    def _make_room(self, rank: int, now: float, memory: float, target: float) -> tuple[float, float]:
        late, woven = self._late[rank], self._woven[rank]
        while memory > target and woven < len(late):
            now, memory = self._weave(rank, late[woven], now, memory)
            woven += 1
        self._woven[rank] = woven
        return now, memory

    def _fill_gap(self, rank: int, now: float, memory: float, ready: float, allowed: float) -> tuple[float, float]:
        late, woven = self._late[rank], self._woven[rank]
        while woven < len(late) and now + self._weight_time[late[woven]] <= ready + EPSILON:
            now, memory = self._weave(rank, late[woven], now, memory)
            woven += 1
        gap = ready - now
        if gap > EPSILON:
            if woven < len(late) and self._idle[rank] + gap > allowed + EPSILON:
                now, memory = self._weave(rank, late[woven], now, memory)
                woven += 1
            elif self._first[rank] < 0:
                self._first[rank] = ready
            else:
                self._idle[rank] += gap
            now = max(now, ready)
        self._woven[rank] = woven
        return now, memory

    def _weave(self, rank: int, stage: int, now: float, memory: float) -> tuple[float, float]:
        if self._record is not None:
            self._record[rank].append((2, stage))
        return now + self._weight_time[stage], memory - self._weight_size[stage]

    def _finish(self) -> Score:
        lengths = []
        for rank, late in enumerate(self._late):
            end = self._now[rank]
            for stage in late[self._woven[rank] :]:
                end, _ = self._weave(rank, stage, end, 0.0)
            lengths.append(end if self.problem.barrier else end - self._first[rank])
        return max(lengths), sum(length * length for length in lengths)


def _bring_backward_before(sequence: list[int], at: int) -> list[int] | None:
    """The row with its next input gradient moved to a position; None if there is none."""
    for later in range(at + 1, len(sequence)):
        if sequence[later] & 1:
            return [*sequence[:at], sequence[later], *sequence[at:later], *sequence[later + 1 :]]
    return None


def to_actions(order: WeaveOrder) -> list[list[ActionBase]]:
    """Actions of a woven order: the microbatches of every stage and kind in turn."""
    makers = (forward, backward_input, backward_weight)
    orders: list[list[ActionBase]] = []
    for row in order:
        count: Counter[tuple[int, int]] = Counter()
        actions: list[ActionBase] = []
        for kind, stage in row:
            actions.append(makers[kind](stage, count[kind, stage]))
            count[kind, stage] += 1
        orders.append(actions)
    return orders
