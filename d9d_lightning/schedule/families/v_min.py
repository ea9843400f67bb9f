"""V-Min: a V at a third of the memory of 1F1B."""

from __future__ import annotations

from d9d_lightning.schedule.families.v_blocks import VBlockOrderBuilder
from d9d_lightning.schedule.search.blocks import V_MIN

__all__ = ["VMinProgramBuilder"]


class VMinProgramBuilder(VBlockOrderBuilder):
    """V-Min (Qi et al., arXiv 2405.15362, section 3.3).

    4 ranks, 8 microbatches, F = I = W::

        0 FFF....fiw..fiwIFW.fiIwFWfiIwFWfiIwFWfiIwFWfiIwW.fiIwW...IW
          012    000  111030 22124133235244346355457466565 77676   77
        1 .FFF..f..iwf..IiWwfFIiWwfFIiWwfFIiWwfFIiWwfFIiWwf.IiWw..IW.
           012  0  001  01012312123423234534345645456756567 6767  77
        2 ..FF.f.f..iwFIW.ifwIFWifwIFWifwIFWifwIFWifwIFWifwIW.iw.IW..
            01 0 1  00200 12113123224234335345446456557567666 77 77
        3 ...FfFf....iIwFWfiIwWFfiIwWFfiIwWFfiIwWFfiIwWFfiIwW..iIwW..
             0011    0002021111332222443333554444665555776666  7777

    The peak is (p + 4) // 3 activations of a whole rank, the least that a V can do with. With F = I = W the bubble is
    about 2/3 of that of 1F1B; where F, I and W differ it grows with the number of microbatches.
    """

    name = "v_min"
    block = V_MIN

    def peak(self, pp_size: int) -> int:
        """A third of the ranks and a little more."""
        return (pp_size + 4) // 3
