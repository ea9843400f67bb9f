"""ZB-V: two chunks per rank in a V, and weight gradients apart, so that bubbles close at the memory of 1F1B."""

from __future__ import annotations

from d9d_lightning.errors import ScheduleError
from d9d_lightning.schedule.actions import ActionBase, backward_input, backward_weight, forward
from d9d_lightning.schedule.builder import ComputeOrderBuilder
from d9d_lightning.schedule.topology import ScheduleStyle

__all__ = ["ZeroBubbleVPipelineProgramBuilder"]


class ZeroBubbleVPipelineProgramBuilder(ComputeOrderBuilder):
    """ZB-V (Qi et al., arXiv 2401.10241, section 6): the order of the paper, filtered to the wanted microbatches.

    4 ranks, 8 microbatches, F = I = W::

        0 FFFFFFFfiwfiwfiwfiwFIWfiwIWfiwIWfiwIWfiwIWIWIWIW...
          012345600011122233370044411555226663377744556677
        1 .FFFFFfFfiwfiwfiwFIWfiwFIWfiwIWfiwIWfiwIiIWIWIWwW..
           012340510021132260043371154422655337664754657677
        2 ..FFFfFfFfiwfiwFIWfiwFIWfiwFIWfiwIWfiwIiIiIWIWwwWW.
            012031420031150042261153372264433755465764756767
        3 ...FfFfFfFfiwFIWfiwFIWfiwFIWfiwFIWfiwIiIiIiIWwwwWWW
             001122330040041151152262263373374445566774567567

    With F = I = W the bubble of ``cost`` is zero and that of ``span`` is (p - 1)F / 2 (F of a whole rank); the peak is
    p activations on every rank. The pattern needs m >= 2p - 1; with fewer it is cut short and leaves bubbles, which the
    ``auto`` builder closes.
    """

    name = "zbv"
    num_stages_per_rank = 2
    topology_style = ScheduleStyle.v

    def order(self, num_microbatches: int, pp_size: int) -> list[list[ActionBase]]:
        """The pattern of at least 2p - 1 microbatches, without the actions of those beyond the wanted number."""
        simulated = max(2 * pp_size - 1, num_microbatches)
        orders = [_RankOrder(rank, pp_size, simulated).build() for rank in range(pp_size)]
        return [[action for action in order if action.microbatch < num_microbatches] for order in orders]


class _RankOrder:
    """Writes the order of one rank, phase by phase. Chunk 0 goes down the V, chunk 1 comes back up."""

    def __init__(self, rank: int, pp_size: int, num_microbatches: int) -> None:
        self.rank, self.pp_size, self.num_microbatches = rank, pp_size, num_microbatches
        self.stages = (rank, 2 * pp_size - 1 - rank)
        self.forwards = [0, 0]
        self.inputs = [0, 0]
        self.weights = [0, 0]
        self.actions: list[ActionBase] = []

    def build(self) -> list[ActionBase]:
        """All phases in turn."""
        self._warm_up()
        self._steady()
        self._cool_down()
        if not self.forwards == self.inputs == self.weights == [self.num_microbatches] * 2:
            raise ScheduleError(
                f"rank {self.rank} of {self.pp_size} has {self.forwards} forwards, {self.inputs} input gradients and "
                f"{self.weights} weight gradients for {self.num_microbatches} microbatches"
            )
        return self.actions

    def _warm_up(self) -> None:
        for _ in range(2 * (self.pp_size - self.rank) - 1):
            self._forward(0)
        for _ in range(self.rank):
            self._forward(1)
            self._forward(0)
        for _ in range(self.pp_size - self.rank):
            self._forward(1)
            self._backward(1)

    def _steady(self) -> None:
        while self.forwards[1] < self.forwards[0] or self.forwards[0] < self.num_microbatches:
            if self.forwards[0] < self.num_microbatches:
                self._forward(0)
            self._backward(0)
            self._forward(1)
            self._backward(1)

    def _cool_down(self) -> None:
        for _ in range(self.rank):
            self._input(0)
            self._input(1)
        for _ in range(self.pp_size - self.rank):
            self._input(0)
            self._weight(0)
        for chunk in (1, 0):
            while self.weights[chunk] < self.inputs[chunk]:
                self._weight(chunk)

    def _backward(self, chunk: int) -> None:
        self._input(chunk)
        self._weight(chunk)

    def _forward(self, chunk: int) -> None:
        self.actions.append(forward(self.stages[chunk], self.forwards[chunk]))
        self.forwards[chunk] += 1

    def _input(self, chunk: int) -> None:
        self.actions.append(backward_input(self.stages[chunk], self.inputs[chunk]))
        self.inputs[chunk] += 1

    def _weight(self, chunk: int) -> None:
        self.actions.append(backward_weight(self.stages[chunk], self.weights[chunk]))
        self.weights[chunk] += 1
