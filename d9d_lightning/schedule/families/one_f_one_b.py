"""1F1B: a backward as soon as there is one, so that few microbatches are alive."""

from __future__ import annotations

from d9d_lightning.schedule.actions import ActionBase
from d9d_lightning.schedule.builder import ComputeOrderBuilder
from d9d_lightning.schedule.families.alternating import alternate
from d9d_lightning.schedule.topology import ScheduleStyle

__all__ = ["OneForwardOneBackwardProgramBuilder"]


class OneForwardOneBackwardProgramBuilder(ComputeOrderBuilder):
    """1F1B, also PipeDream-flush or DAPPLE (Narayanan et al., arXiv 2006.09503, section 3).

    4 ranks, 8 microbatches, F = I = W::

        0 FFFF......B-FB-FB-FB-FB-.B-.B-.B-
          0123      0 41 52 63 74  5  6  7
        1 .FFF....B-FB-FB-FB-FB-FB-.B-.B-..
           012    0 31 42 53 64 75  6  7
        2 ..FF..B-FB-FB-FB-FB-FB-FB-.B-....
            01  0 21 32 43 54 65 76  7
        3 ...FB-FB-FB-FB-FB-FB-FB-FB-......
             00 11 22 33 44 55 66 77

    Bubble (p - 1)(F + I + W) without latency, peak of min(p - rank, m) activations, any number of microbatches.
    """

    name = "1f1b"
    num_stages_per_rank = 1
    topology_style = ScheduleStyle.loop

    def order(self, num_microbatches: int, pp_size: int) -> list[list[ActionBase]]:
        """Enough forwards to reach the last rank, then one backward, one forward, and so on."""
        return [alternate(rank, num_microbatches, pp_size - 1 - rank) for rank in range(pp_size)]
