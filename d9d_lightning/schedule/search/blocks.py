"""V schedules that hold little: one building block per microbatch, repeated, pushed together, and its ends mended.

After Qi et al., Pipeline Parallelism with Controllable Memory, arXiv 2405.15362, sections 3 and 4. A block says at
which tick of six each rank runs the four actions of one microbatch; how long a microbatch stays on a rank decides
memory.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from d9d_lightning.schedule.search.problem import Code, Sequences

__all__ = ["V_HALF", "V_MIN", "Block", "arrange_blocks"]

_PERIOD = 6
"""Ticks that one microbatch takes on every rank: two stages of F, I and W."""


@dataclass(frozen=True)
class Block:
    """Ticks of one microbatch on a V of ``p`` ranks; a tick of rank ``r`` is ``slope * r + per_rank * p + constant``.

    Attributes:
        down: (slope, per_rank, constant) of the forward on the way down the V.
        up: Of the forward on the way up.
        back_down: Of the input gradient of the upper stage.
        back_up: Of the input gradient of the lower stage.
        shift_every: Ranks whose number is a multiple of this would collide...
        shift: ... so their input gradients come this much later.
    """

    down: tuple[int, int, int]
    up: tuple[int, int, int]
    back_down: tuple[int, int, int]
    back_up: tuple[int, int, int]
    shift_every: int
    shift: int

    def ticks(self, rank: int, num_ranks: int) -> dict[Code, int]:
        """First tick of every action of a rank."""
        late = self.shift if num_ranks % self.shift_every == 0 else 0
        upper = 2 * num_ranks - 1 - rank
        rows = [(2 * rank, self.down, 0), (2 * upper, self.up, 0)]
        rows += [(2 * upper + 1, self.back_down, late), (2 * rank + 1, self.back_up, late)]
        return {code: a * rank + b * num_ranks + c + more for code, (a, b, c), more in rows}


V_MIN = Block((1, 0, 0), (-1, 2, -1), (1, 2, 0), (-1, 4, -1), shift_every=3, shift=2)
"""A third of the memory of 1F1B."""

V_HALF = Block((2, 0, 0), (-1, 3, -2), (2, 3, -1), (-1, 6, -2), shift_every=2, shift=3)
"""Half of the memory of 1F1B."""


def arrange_blocks(block: Block, num_ranks: int, num_microbatches: int, limit: int) -> Sequences:
    """Order of forwards and input gradients that repeats a block.

    Args:
        block: The building block.
        num_ranks: Number of ranks.
        num_microbatches: Number of microbatches.
        limit: The most stage activations that a rank may hold; at least what the block holds.

    Returns:
        For every rank, its order. Where a rank would wait at either end, it takes a later action that is ready, as
        long as the order that remains still fits in the limit.
    """
    rows = [_repeat(block.ticks(rank, num_ranks), num_microbatches) for rank in range(num_ranks)]
    return _Mender(rows, limit).run()


def _repeat(ticks: dict[Code, int], num_microbatches: int) -> list[Code]:
    """The repeated block of one rank; -1 - stage stands for a weight gradient, put into the first free tick."""
    taken = {tick + _PERIOD * i: code for code, tick in ticks.items() for i in range(num_microbatches)}
    order: list[Code] = []
    late: deque[int] = deque()
    tick, last = min(taken), max(taken)
    while tick <= last or late:
        if tick in taken:
            order.append(taken[tick])
            if taken[tick] & 1:
                late.append(taken[tick] >> 1)
        elif late:
            order.append(-1 - late.popleft())
        tick += 1
    return order


class _Mender:
    """Runs the repeated blocks tick by tick; a rank that would wait takes a later action that is ready."""

    def __init__(self, rows: list[list[Code]], limit: int) -> None:
        self.rows, self.limit = rows, limit
        self.last = 2 * len(rows) - 1
        self.memory = [0] * len(rows)
        self.done = [0] * (2 * self.last + 2)
        self.available = [0] * (2 * self.last + 2)
        self.woven = [0] * (self.last + 1)

    def run(self) -> Sequences:
        orders: Sequences = [[] for _ in self.rows]
        while any(self.rows):
            chosen = [self._choose(rank) for rank in range(len(self.rows))]
            for rank, position in enumerate(chosen):
                if position is not None:
                    code = self.rows[rank].pop(position)
                    self._count(rank, code)
                    if code >= 0:
                        orders[rank].append(code)
        return orders

    def _choose(self, rank: int) -> int | None:
        """Position of the first remaining action that is ready and fits; a weight gradient only if it is due."""
        held = peak = self.memory[rank]
        seen: set[Code] = set()
        fallback: int | None = None
        for position, code in enumerate(self.rows[rank]):
            if code not in seen:
                seen.add(code)
                if self._is_ready(code) and (position == 0 or code & 1 or code < 0 or peak < self.limit):
                    if code >= 0 or position == 0:
                        return position
                    fallback = position if fallback is None else fallback
            held += (code < 0) * -1 + (code >= 0 and not code & 1)
            peak = max(peak, held)
            if len(seen) == _PERIOD:
                break
        return fallback

    def _is_ready(self, code: Code) -> bool:
        if code < 0:
            return self.woven[-1 - code] < self.done[2 * (-1 - code) + 1]
        source = code - 2 if not code & 1 else (code + 2 if code >> 1 < self.last else code - 1)
        return source < 0 or self.done[code] < self.done[source]

    def _count(self, rank: int, code: Code) -> None:
        if code < 0:
            self.woven[-1 - code] += 1
            self.memory[rank] -= 1
        else:
            self.done[code] += 1
            self.memory[rank] += not code & 1
