"""ZB-H2: more forwards ahead than 1F1B, so that no rank waits between its first and its last action."""

from __future__ import annotations

from d9d_lightning.errors import ScheduleError
from d9d_lightning.schedule.actions import ActionBase
from d9d_lightning.schedule.builder import ComputeOrderBuilder
from d9d_lightning.schedule.families.alternating import alternate
from d9d_lightning.schedule.topology import ScheduleStyle

__all__ = ["ZeroBubbleH2ProgramBuilder"]


class ZeroBubbleH2ProgramBuilder(ComputeOrderBuilder):
    """ZB-H2 (Qi et al., arXiv 2401.10241, section 3.2).

    4 ranks, 8 microbatches, F = I = W::

        0 FFFFFFFIWFIWIWIWIWIWIWIW...
          012345600711223344556677
        1 .FFFFFIFIFIWFIWIWIWIWIWWW..
           012340516207314253647567
        2 ..FFFIFIFIFIFIWFIWIWIWWWWW.
            012031425364075162734567
        3 ...FIFIFIFIFIFIFIWFIWWWWWWW
             001122334455660771234567

    Bubble of ``cost`` (p - 1)(F + I - 2W) where W <= min(F, I): none with F = I = W. It takes a peak of 2p - 1
    activations, and needs an optimizer step without a barrier: ``span`` is that of ZB-H1.
    """

    name = "zb_h2"
    num_stages_per_rank = 1
    topology_style = ScheduleStyle.loop

    def require(self, num_microbatches: int, pp_size: int) -> None:
        """The warm-up takes two microbatches for each rank.

        Raises:
            ScheduleError: There are fewer.
        """
        if num_microbatches < 2 * pp_size:
            raise ScheduleError(
                f"schedule 'zb_h2' needs num_microbatches >= 2 * pp_size = {2 * pp_size}, got num_microbatches="
                f"{num_microbatches} with pp_size={pp_size}; use zb_h1, which takes any number"
            )

    def order(self, num_microbatches: int, pp_size: int) -> list[list[ActionBase]]:
        """Two forwards ahead for each rank that follows, weight gradients two turns late for each rank before."""
        return [alternate(rank, num_microbatches, 2 * (pp_size - 1 - rank), 2 * rank) for rank in range(pp_size)]
