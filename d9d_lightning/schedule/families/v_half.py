"""V-Half: a V at half the memory of 1F1B."""

from __future__ import annotations

from d9d_lightning.schedule.families.v_blocks import VBlockOrderBuilder
from d9d_lightning.schedule.search.blocks import V_HALF

__all__ = ["VHalfProgramBuilder"]


class VHalfProgramBuilder(VBlockOrderBuilder):
    """V-Half (Qi et al., arXiv 2405.15362, section 3.3).

    TIMELINE

    With F = I = W the bubble is (6p - 1 - 3k) / 6 of the work of one microbatch on a rank, where k = 2((p + 2) // 2) is
    the peak in stage activations: (p + 2) // 2 activations of a whole rank.
    """

    name = "v_half"
    block = V_HALF

    def peak(self, pp_size: int) -> int:
        """Half of the ranks and one."""
        return (pp_size + 2) // 2
