"""Interleaved zero bubble: 1F1B with several stages per rank and weight gradients put off."""

from __future__ import annotations

from d9d_lightning.schedule.actions import ActionBase, backward_input, backward_weight, forward
from d9d_lightning.schedule.families.looped import InterleavedOrderBuilder

__all__ = ["InterleavedZeroBubbleProgramBuilder"]


class InterleavedZeroBubbleProgramBuilder(InterleavedOrderBuilder):
    """The schedule of ZB-H1 (Qi et al., arXiv 2401.10241, section 3.1) on interleaved stages.

    4 ranks, 8 microbatches, F = I = W::

        0 FFFFffff...iwFiwFiwFiwFIWfIWfIWfIWfiwiwiwiwIWIWIWIW
          01230123   0041152263370041152263374455667744556677
        1 .FFFFfff..ifiwFiwFiwFIwFIWfIWfIWfiWfiwiwiwIwIWIWIWW
           0123012  03104215326037104215326437546576475465767
        2 ..FFFFff.ififiwFiwFIwFIwFIWfIWfiWfiWfiwiwIwIwIWIWWW
            012301 021320431502613720431542653764754657647567
        3 ...FFFFfifififiwFIwFIwFIwFIWfiWfiWfiWfiwIwIwIwIWWWW
             012300112233040151262373044155266377445566774567

    Bubble (p - 1)(F + I - W) / v where W <= min(F, I), peak of p activations (v = 2). One forward ahead for each rank
    that follows; rank r does its weight gradients r turns late. Microbatches come in whole rounds of the ranks.

    Args:
        stages_per_rank: Number of stages that each rank hosts (v).
    """

    name = "zb1p"

    def order(self, num_microbatches: int, pp_size: int) -> list[list[ActionBase]]:
        """Forward, input gradient, and the weight gradient of ``rank`` turns before."""
        total = self.num_stages_per_rank * num_microbatches
        orders: list[list[ActionBase]] = []
        for rank in range(pp_size):
            ahead = self.count_warm_up(rank, num_microbatches, pp_size, ahead_per_rank=1)
            turns = [forward(*self.forward_at(k, rank, num_microbatches, pp_size)) for k in range(total)]
            backwards = [self.backward_at(k, rank, num_microbatches, pp_size) for k in range(total)]
            order: list[ActionBase] = list(turns[:ahead])
            for k in range(total):
                order += turns[k + ahead : k + ahead + 1]
                order.append(backward_input(*backwards[k]))
                if k >= rank:
                    order.append(backward_weight(*backwards[k - rank]))
            order += [backward_weight(*where) for where in backwards[max(0, total - rank) :]]
            orders.append(order)
        return orders
