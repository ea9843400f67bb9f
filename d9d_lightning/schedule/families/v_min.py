"""V-Min: a V at a third of the memory of 1F1B."""

from __future__ import annotations

from d9d_lightning.schedule.families.v_blocks import VBlockOrderBuilder
from d9d_lightning.schedule.search.blocks import V_MIN

__all__ = ["VMinProgramBuilder"]


class VMinProgramBuilder(VBlockOrderBuilder):
    """V-Min (Qi et al., arXiv 2405.15362, section 3.3).

    TIMELINE

    The peak is (p + 4) // 3 activations of a whole rank, the least that a V can do with. With F = I = W the bubble is
    about 2/3 of that of 1F1B; where F, I and W differ it grows with the number of microbatches.
    """

    name = "v_min"
    block = V_MIN

    def peak(self, pp_size: int) -> int:
        """A third of the ranks and a little more."""
        return (pp_size + 4) // 3
