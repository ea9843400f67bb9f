"""The question that the search answers, in plain numbers."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from d9d_lightning.schedule.actions import ActionBase, ActionKind
from d9d_lightning.schedule.costs import StageCosts

__all__ = ["EPSILON", "Code", "OrderProblem", "Sequences", "codes_of", "mirror"]

EPSILON = 1e-9

Code = int
"""``2 * stage`` for a forward, ``2 * stage + 1`` for an input gradient. Microbatches of a stage come in order, so an
order needs no numbers of microbatches."""

Sequences = list[list[Code]]
"""Forwards and input gradients of every rank, in order; weight gradients find their own places."""


@dataclass(frozen=True)
class OrderProblem:
    """Costs, placement, memory limit and aim.

    Attributes:
        num_ranks: Number of ranks.
        num_microbatches: Number of microbatches.
        rank_of: Rank of every stage.
        costs: Costs, one number per stage.
        limit: The most that a rank may hold, in stage activations.
        barrier: Make ``span`` small if true, else ``cost``.
    """

    num_ranks: int
    num_microbatches: int
    rank_of: tuple[int, ...]
    costs: StageCosts
    limit: float
    barrier: bool

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.rank_of)

    @functools.cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """Stages of every rank, ascending."""
        return tuple(
            tuple(stage for stage, host in enumerate(self.rank_of) if host == rank) for rank in range(self.num_ranks)
        )

    @functools.cached_property
    def num_actions(self) -> int:
        """Number of compute actions of a whole program."""
        return 3 * self.num_stages * self.num_microbatches

    @functools.cached_property
    def work(self) -> tuple[float, ...]:
        """Time that each rank computes."""
        forward, _, inputs, weights = self.costs.times
        return tuple(
            sum(self.num_microbatches * (forward[s] + inputs[s] + weights[s]) for s in stages)
            for stages in self.stages_of
        )

    @functools.cached_property
    def lower_bound(self) -> float:
        """No order is faster than this: the way of one microbatch, and what every rank must work and wait."""
        forward, _, inputs, weights = self.costs.times
        reached = [0.0]
        for stage in range(1, self.num_stages):
            reached.append(reached[-1] + forward[stage - 1] + self._hop(stage))
        returned = [reached[-1] + forward[-1]]
        for stage in reversed(range(1, self.num_stages)):
            returned.append(returned[-1] + inputs[stage] + self._hop(stage))
        returned.reverse()
        bound = returned[0] + inputs[0] + weights[0]
        for rank, stages in enumerate(self.stages_of):
            head = min(reached[stage] for stage in stages)
            waits = 0.0
            if len(stages) == 1:
                # Until the first input gradient is back, a rank can only run the forwards that it has memory for.
                size = self.costs.activation[stages[0]]
                fits = self.num_microbatches if size == 0 else int(self.limit / size + EPSILON)
                waits = returned[stages[0]] - head - min(fits, self.num_microbatches) * forward[stages[0]]
            bound = max(bound, (head if self.barrier else 0.0) + self.work[rank] + max(0.0, waits))
        return bound

    def _hop(self, stage: int) -> float:
        """Latency between a stage and the one before it."""
        return 0.0 if self.rank_of[stage - 1] == self.rank_of[stage] else self.costs.communication


def codes_of(orders: Sequence[Sequence[ActionBase]]) -> Sequences:
    """Forwards and input gradients of a program of compute actions; a full backward counts as an input gradient."""
    return [
        [
            2 * part.stage + (part.kind is not ActionKind.F)
            for action in order
            for part in action.parts
            if part.kind is not ActionKind.W
        ]
        for order in orders
    ]


def mirror(sequences: Sequences) -> Sequences:
    """The order run backwards in time, where forwards and input gradients change places; it holds as much memory."""
    return [[code ^ 1 for code in reversed(sequence)] for sequence in sequences]
