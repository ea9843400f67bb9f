"""V-Half: a V at half the memory of 1F1B."""

from __future__ import annotations

from d9d_lightning.schedule.families.v_blocks import VBlockOrderBuilder
from d9d_lightning.schedule.search.blocks import V_HALF

__all__ = ["VHalfProgramBuilder"]


class VHalfProgramBuilder(VBlockOrderBuilder):
    """V-Half (Qi et al., arXiv 2405.15362, section 3.3).

    4 ranks, 8 microbatches, F = I = W::

        0 FFFFF..fiwfiw.fiIwWfFiIwWfFiIwWfFiIwWfiIwW.fiIwIWW.IW
          01234  000111 2202035313146424257535366464 7757656 77
        1 .FFFF.f.fiw.ifwIFWfiIwFWfiIwFWfiIwFWfiIiwWfwIiIWwWIW.
           0123 0 100 1210403212514323625434736546547657657677
        2 ..FFFfFf..iwfiIwWfFIiWwfFIiWwfFIiWwfFIiWwfiIwIiWWIwW.
            012031  002101034121245232356343467454576566756777
        3 ...FfFfFf..iIwFWfiIwFWfiIwFWfiIwFWfiIwFWfiIiIwWiIwWwW
             001122  000303111414222525333636444747556655776677

    With F = I = W the bubble is (6p - 1 - 3k) / 6 of the work of one microbatch on a rank, where k = 2((p + 2) // 2) is
    the peak in stage activations: (p + 2) // 2 activations of a whole rank.
    """

    name = "v_half"
    block = V_HALF

    def peak(self, pp_size: int) -> int:
        """Half of the ranks and one."""
        return (pp_size + 2) // 2
