"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from d9d_lightning.schedule.actions import ActionBase, backward_full, forward
from d9d_lightning.schedule.builder import ComputeOrderBuilder
from d9d_lightning.schedule.topology import ScheduleStyle

__all__ = ["GPipeProgramBuilder"]


class GPipeProgramBuilder(ComputeOrderBuilder):
    """GPipe (Huang et al., arXiv 1811.06965, section 2.3).

    4 ranks, 8 microbatches, F = I = W::

        0 FFFFFFFF.........B-B-B-B-B-B-B-B-
          01234567         0 1 2 3 4 5 6 7
        1 .FFFFFFFF......B-B-B-B-B-B-B-B-..
           01234567      0 1 2 3 4 5 6 7
        2 ..FFFFFFFF...B-B-B-B-B-B-B-B-....
            01234567   0 1 2 3 4 5 6 7
        3 ...FFFFFFFFB-B-B-B-B-B-B-B-......
             012345670 1 2 3 4 5 6 7

    Bubble (p - 1)(F + I + W), peak of m activations on every rank.
    """

    name = "gpipe"
    num_stages_per_rank = 1
    topology_style = ScheduleStyle.loop

    def order(self, num_microbatches: int, pp_size: int) -> list[list[ActionBase]]:
        """Forwards in order, then backwards in order."""
        microbatches = range(num_microbatches)
        return [
            [*(forward(rank, i) for i in microbatches), *(backward_full(rank, i) for i in microbatches)]
            for rank in range(pp_size)
        ]
