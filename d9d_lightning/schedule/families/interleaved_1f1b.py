"""Interleaved 1F1B: several stages per rank in a loop shorten the fill and drain of 1F1B."""

from __future__ import annotations

from d9d_lightning.schedule.actions import ActionBase, backward_full, forward
from d9d_lightning.schedule.families.looped import InterleavedOrderBuilder

__all__ = ["Interleaved1F1BProgramBuilder"]


class Interleaved1F1BProgramBuilder(InterleavedOrderBuilder):
    """Interleaved 1F1B (Narayanan et al., Megatron-LM, arXiv 2104.04473, section 2.2).

    4 ranks, 8 microbatches, F = I = W::

        0 FFFFffffFFF...b-Fb-.fb-fb-fB-fB-B-.B-.b-.b-.b-.b-B-B-B-B-
          01230123456   0 71  42 53 60 71 2  3  4  5  6  7 4 5 6 7
        1 .FFFFffffF..b-Fb-Fb-Fb-fB-fB-fB-fB-.b-.b-.b-.b-B-B-B-B-..
           012301234  0 51 62 73 40 51 62 73  4  5  6  7 4 5 6 7
        2 ..FFFFfff.b-fb-Fb-Fb-FB-FB-fB-fB-fb-fb-.b-.b-B-B-B-B-....
            0123012 0 31 42 53 60 71 42 53 64 75  6  7 4 5 6 7
        3 ...FFFFfb-fb-fb-fb-FB-FB-FB-FB-fb-fb-fb-fb-B-B-B-B-......
             012300 11 22 33 40 51 62 73 44 55 66 77 4 5 6 7

    Bubble (p - 1)(F + I + W) / v, peak of p + (p - 1) / v activations, v times the communication of 1F1B. Microbatches
    come in whole rounds of the ranks.

    Args:
        stages_per_rank: Number of stages that each rank hosts (v).
    """

    name = "interleaved_1f1b"

    def order(self, num_microbatches: int, pp_size: int) -> list[list[ActionBase]]:
        """Two forwards ahead for each rank that follows, then one forward and one backward in turn."""
        total = self.num_stages_per_rank * num_microbatches
        orders: list[list[ActionBase]] = []
        for rank in range(pp_size):
            ahead = self.count_warm_up(rank, num_microbatches, pp_size, ahead_per_rank=2)
            turns = [forward(*self.forward_at(k, rank, num_microbatches, pp_size)) for k in range(total)]
            order: list[ActionBase] = list(turns[:ahead])
            for k in range(total):
                order += turns[k + ahead : k + ahead + 1]
                order.append(backward_full(*self.backward_at(k, rank, num_microbatches, pp_size)))
            orders.append(order)
        return orders
