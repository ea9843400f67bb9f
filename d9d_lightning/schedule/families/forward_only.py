"""Forwards only, for evaluation, on the placement of any training schedule."""

from __future__ import annotations

from d9d_lightning.schedule.actions import ActionBase, forward
from d9d_lightning.schedule.builder import ComputeOrderBuilder
from d9d_lightning.schedule.topology import ScheduleStyle, build_stage_to_host_rank_topology

__all__ = ["ForwardOnlyProgramBuilder"]


class ForwardOnlyProgramBuilder(ComputeOrderBuilder):
    """Evaluation: each microbatch runs through all stages, the one furthest on first.

    4 ranks, 8 microbatches, F = I = W::

        0 FFFFFFFF...
          01234567
        1 .FFFFFFFF..
           01234567
        2 ..FFFFFFFF.
            01234567
        3 ...FFFFFFFF
             01234567

    Bubble (p - 1)F in a loop of one stage per rank, 2(p - 1)F of a chunk in a V. Outputs leave as early as they can,
    and few microbatches wait between stages.

    Args:
        stages_per_rank: Number of stages that each rank hosts.
        style: Placement of the training schedule.
    """

    name = "forward_only"

    def __init__(self, stages_per_rank: int = 1, style: ScheduleStyle = ScheduleStyle.loop) -> None:
        self._stages_per_rank = stages_per_rank
        self._style = style

    @property
    def num_stages_per_rank(self) -> int:
        """Number of stages that each rank hosts."""
        return self._stages_per_rank

    @property
    def topology_style(self) -> ScheduleStyle:
        """Placement of the training schedule."""
        return self._style

    def order(self, num_microbatches: int, pp_size: int) -> list[list[ActionBase]]:
        """Clock ticks of one forward each; every rank takes its furthest stage that has an input."""
        num_stages = self._stages_per_rank * pp_size
        stage_to_rank = build_stage_to_host_rank_topology(pp_size, num_stages, self._style)
        hosted = [[s for s in reversed(range(num_stages)) if stage_to_rank[s] == rank] for rank in range(pp_size)]
        orders: list[list[ActionBase]] = [[] for _ in range(pp_size)]
        done = [0] * num_stages
        while done[-1] < num_microbatches:
            available = [num_microbatches, *done]
            for rank, stages in enumerate(hosted):
                stage = next((s for s in stages if done[s] < available[s]), None)
                if stage is not None:
                    orders[rank].append(forward(stage, done[stage]))
                    done[stage] += 1
        return orders
