"""ZB-H1: 1F1B with weight gradients put off, at the memory of 1F1B."""

from __future__ import annotations

from d9d_lightning.schedule.actions import ActionBase
from d9d_lightning.schedule.builder import ComputeOrderBuilder
from d9d_lightning.schedule.families.alternating import alternate
from d9d_lightning.schedule.topology import ScheduleStyle

__all__ = ["ZeroBubbleH1ProgramBuilder"]


class ZeroBubbleH1ProgramBuilder(ComputeOrderBuilder):
    """ZB-H1 (Qi et al., arXiv 2401.10241, section 3.1).

    4 ranks, 8 microbatches, F = I = W::

        0 FFFF...IWFIWFIWFIWFIWIWIWIW
          0123   00411522633744556677
        1 .FFF..IFIWFIWFIWFIWFIWIWIWW
           012  031042153264375465767
        2 ..FF.IFIFIWFIWFIWFIWFIWIWWW
            01 0213204315426537647567
        3 ...FIFIFIFIWFIWFIWFIWFIWWWW
             001122330441552663774567

    Bubble (p - 1)(F + I - W) where W <= min(F, I), peak of p activations. Rank r does its weight gradients r turns
    late, so input gradients go up the pipeline without waiting for them.
    """

    name = "zb_h1"
    num_stages_per_rank = 1
    topology_style = ScheduleStyle.loop

    def order(self, num_microbatches: int, pp_size: int) -> list[list[ActionBase]]:
        """Forward, input gradient, and the weight gradient of ``rank`` turns before."""
        return [alternate(rank, num_microbatches, pp_size - 1 - rank, rank) for rank in range(pp_size)]
