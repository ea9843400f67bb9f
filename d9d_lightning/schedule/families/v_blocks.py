"""What V-Half and V-Min share: a building block, and a limit that follows from the number of ranks."""

from __future__ import annotations

import abc

from d9d_lightning.schedule.actions import ActionBase
from d9d_lightning.schedule.builder import ComputeOrderBuilder
from d9d_lightning.schedule.costs import UNIT_COSTS
from d9d_lightning.schedule.search.blocks import Block, arrange_blocks
from d9d_lightning.schedule.search.problem import OrderProblem
from d9d_lightning.schedule.search.weave import Weaver, to_actions
from d9d_lightning.schedule.topology import ScheduleStyle, build_stage_to_host_rank_topology

__all__ = ["VBlockOrderBuilder"]


class VBlockOrderBuilder(ComputeOrderBuilder, abc.ABC):
    """A V schedule that repeats one building block; weight gradients are placed as if F = I = W."""

    num_stages_per_rank = 2
    topology_style = ScheduleStyle.v
    block: Block

    @abc.abstractmethod
    def peak(self, pp_size: int) -> int:
        """The most that a rank holds, in activations of a whole rank."""

    def order(self, num_microbatches: int, pp_size: int) -> list[list[ActionBase]]:
        """The block repeated, both ends mended, weight gradients in the gaps."""
        num_stages, limit = 2 * pp_size, 2 * self.peak(pp_size)
        placement = tuple(build_stage_to_host_rank_topology(pp_size, num_stages, ScheduleStyle.v).values())
        problem = OrderProblem(
            pp_size, num_microbatches, placement, UNIT_COSTS.for_stages(num_stages), limit, barrier=True
        )
        sequences = arrange_blocks(self.block, pp_size, num_microbatches, limit)
        return to_actions(Weaver(problem).orders(sequences, (0.0,) * pp_size))
