"""Looped breadth-first: all microbatches of one stage, then all of the next."""

from __future__ import annotations

from d9d_lightning.schedule.actions import ActionBase, backward_full, forward
from d9d_lightning.schedule.families.looped import LoopedOrderBuilder

__all__ = ["LoopedBFSProgramBuilder"]


class LoopedBFSProgramBuilder(LoopedOrderBuilder):
    """Breadth-first pipeline parallelism (Lamy-Poirier, arXiv 2211.05953, section 4).

    4 ranks, 8 microbatches, F = I = W::

        0 FFFFFFFFffffffff.........b-b-b-b-b-b-b-b-B-B-B-B-B-B-B-B-
          0123456701234567         7 6 5 4 3 2 1 0 7 6 5 4 3 2 1 0
        1 .FFFFFFFFffffffff......b-b-b-b-b-b-b-b-B-B-B-B-B-B-B-B-..
           0123456701234567      7 6 5 4 3 2 1 0 7 6 5 4 3 2 1 0
        2 ..FFFFFFFFffffffff...b-b-b-b-b-b-b-b-B-B-B-B-B-B-B-B-....
            0123456701234567   7 6 5 4 3 2 1 0 7 6 5 4 3 2 1 0
        3 ...FFFFFFFFffffffffb-b-b-b-b-b-b-b-B-B-B-B-B-B-B-B-......
             01234567012345677 6 5 4 3 2 1 0 7 6 5 4 3 2 1 0

    Bubble (p - 1)(F + I + W) / v, peak of m activations on every rank. Runs the microbatches of a stage together, so
    it stands latency well, and the gradients of a stage are complete early.

    Args:
        stages_per_rank: Number of stages that each rank hosts (v).
    """

    name = "looped_bfs"

    def order(self, num_microbatches: int, pp_size: int) -> list[list[ActionBase]]:
        """Forwards by stage, then backwards by stage from the last one, both directions mirrored."""
        orders: list[list[ActionBase]] = []
        for rank in range(pp_size):
            stages = range(rank, self.num_stages_per_rank * pp_size, pp_size)
            order: list[ActionBase] = [forward(s, i) for s in stages for i in range(num_microbatches)]
            order += [backward_full(s, i) for s in reversed(stages) for i in reversed(range(num_microbatches))]
            orders.append(order)
        return orders
