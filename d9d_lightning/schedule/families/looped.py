"""What families with several stages per rank in a loop share."""

from __future__ import annotations

import abc

from d9d_lightning.errors import ScheduleError
from d9d_lightning.schedule.builder import ComputeOrderBuilder
from d9d_lightning.schedule.topology import ScheduleStyle

__all__ = ["InterleavedOrderBuilder", "LoopedOrderBuilder"]


class LoopedOrderBuilder(ComputeOrderBuilder, abc.ABC):
    """A family of ``stages_per_rank`` stages on every rank, stage ``s`` on rank ``s % pp_size``."""

    topology_style = ScheduleStyle.loop

    def __init__(self, stages_per_rank: int = 2) -> None:
        if stages_per_rank < 1:
            raise ScheduleError(f"schedule {self.name!r} needs at least 1 stage per rank, got {stages_per_rank}")
        self._stages_per_rank = stages_per_rank

    @property
    def num_stages_per_rank(self) -> int:
        """Number of stages that each rank hosts."""
        return self._stages_per_rank


class InterleavedOrderBuilder(LoopedOrderBuilder, abc.ABC):
    """A looped family whose ranks take microbatches in equal rounds, one stage after the other within a round."""

    def require(self, num_microbatches: int, pp_size: int) -> None:
        """Microbatches must fill whole rounds of (at least) ``pp_size``.

        Raises:
            ScheduleError: They do not.
        """
        rounds = _count_rounds(num_microbatches, pp_size)
        if num_microbatches % rounds:
            raise ScheduleError(
                f"schedule {self.name!r} takes microbatches in {rounds} equal rounds of at least pp_size={pp_size}, "
                f"got num_microbatches={num_microbatches}; use a multiple of {pp_size}, or looped_bfs, which takes any"
            )

    def forward_at(self, turn: int, rank: int, num_microbatches: int, pp_size: int) -> tuple[int, int]:
        """(stage, microbatch) of the ``turn``-th forward of a rank."""
        chunk, microbatch = self._chunk_at(turn, num_microbatches, pp_size)
        return chunk * pp_size + rank, microbatch

    def backward_at(self, turn: int, rank: int, num_microbatches: int, pp_size: int) -> tuple[int, int]:
        """(stage, microbatch) of the ``turn``-th backward of a rank: as forwards, from the last stage."""
        chunk, microbatch = self._chunk_at(turn, num_microbatches, pp_size)
        return (self._stages_per_rank - 1 - chunk) * pp_size + rank, microbatch

    def count_warm_up(self, rank: int, num_microbatches: int, pp_size: int, ahead_per_rank: int) -> int:
        """Forwards before the first backward: a round on each stage but one, and some for each rank that follows."""
        per_round = num_microbatches // _count_rounds(num_microbatches, pp_size)
        wanted = (self._stages_per_rank - 1) * per_round + ahead_per_rank * (pp_size - 1 - rank)
        return min(wanted, self._stages_per_rank * num_microbatches)

    def _chunk_at(self, turn: int, num_microbatches: int, pp_size: int) -> tuple[int, int]:
        per_round = num_microbatches // _count_rounds(num_microbatches, pp_size)
        this_round, within = divmod(turn, per_round * self._stages_per_rank)
        chunk, offset = divmod(within, per_round)
        return chunk, this_round * per_round + offset


def _count_rounds(num_microbatches: int, pp_size: int) -> int:
    return max(1, num_microbatches // pp_size)
