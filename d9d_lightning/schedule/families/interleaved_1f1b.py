"""Interleaved 1F1B: several stages per rank in a loop shorten the fill and drain of 1F1B."""

from __future__ import annotations

from d9d_lightning.schedule.actions import ActionBase, backward_full, forward
from d9d_lightning.schedule.families.looped import InterleavedOrderBuilder

__all__ = ["Interleaved1F1BProgramBuilder"]


class Interleaved1F1BProgramBuilder(InterleavedOrderBuilder):
    """Interleaved 1F1B (Narayanan et al., Megatron-LM, arXiv 2104.04473, section 2.2).

    TIMELINE

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
