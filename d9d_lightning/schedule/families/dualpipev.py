"""DualPipeV: microbatches go down and up a V, and a forward overlaps a backward of the other direction."""

from __future__ import annotations

from collections import deque

from d9d_lightning.errors import ScheduleError
from d9d_lightning.schedule.actions import (
    ActionBase,
    ComposeAction,
    backward_full,
    backward_input,
    backward_weight,
    forward,
)
from d9d_lightning.schedule.builder import ComputeOrderBuilder
from d9d_lightning.schedule.topology import ScheduleStyle

__all__ = ["DualPipeVProgramBuilder"]


class DualPipeVProgramBuilder(ComputeOrderBuilder):
    """DualPipe (DeepSeek-AI, arXiv 2412.19437, section 3.2.1), cut in half: two stages per rank in a V.

    4 ranks, 8 microbatches, F = I = W::

        0 FFFFFFFfiwfiwfiwfFb-...fB-b-.fB-b-.fB-b-.fB-b-IWIWIWIW
          0123456000111222373    40 4  51 5  62 6  73 7 44556677
        1 .FFFFFfFfiwfiwfFb-..fB-Fb-fB-b-.fB-b-.fB-b-B-.iIwIWIWW
           0123405100211362   40 73 51 4  62 5  73 6 4  75765767
        2 ..FFFfFfFfiwfFb-.fB-Fb-fB-Fb-fB-b-.fB-b-B-.b-I.iIWIwWW
            0120314200351  40 62 51 73 62 4  73 5 4  6 5 7657767
        3 ...FfFfFfFfFb-fB-Fb-fB-Fb-fB-Fb-fB-b-B-.b-B-.iI.iIwWwW
             0011223340 40 51 51 62 62 73 73 4 4  5 5  66 776677

    With S = 2p stages and F&B the time of an overlapped pair, the bubble is (S / 2 - 1)(F&B + B - 3W) in stage costs
    (F = I, W <= F), and the peak S + 1 stage activations. It pays where a forward and a backward really overlap.
    """

    name = "dualpipev"
    num_stages_per_rank = 2
    topology_style = ScheduleStyle.v

    def require(self, num_microbatches: int, pp_size: int) -> None:
        """Both directions must be full once.

        Raises:
            ScheduleError: There are fewer microbatches than stages.
        """
        if num_microbatches < 2 * pp_size:
            raise ScheduleError(
                f"schedule 'dualpipev' needs num_microbatches >= 2 * pp_size = {2 * pp_size}, got num_microbatches="
                f"{num_microbatches} with pp_size={pp_size}; use zbv, which takes any number"
            )

    def order(self, num_microbatches: int, pp_size: int) -> list[list[ActionBase]]:
        """Eight steps on every rank."""
        return [_RankOrder(rank, pp_size, num_microbatches).build() for rank in range(pp_size)]


class _RankOrder:
    """Writes the order of one rank. Chunk 0 goes down the V, chunk 1 comes back up."""

    def __init__(self, rank: int, pp_size: int, num_microbatches: int) -> None:
        self.rank, self.pp_size, self.num_microbatches = rank, pp_size, num_microbatches
        self.stages = (rank, 2 * pp_size - 1 - rank)
        self.forwards = [0, 0]
        self.backwards = [0, 0]
        self.late_weights: deque[ActionBase] = deque()
        self.actions: list[ActionBase] = []

    def build(self) -> list[ActionBase]:
        """The steps, with the names that the DualPipe authors gave them."""
        after = self.pp_size - 1 - self.rank
        self._step_1_n_f0(2 * after)
        self._step_2_n_f0f1(self.rank + 1)
        self._step_3_n_i1w1f1(after)
        self._step_4_n_f0b1f1b0(self.num_microbatches - 2 * self.pp_size + self.rank + 1)
        self._step_5_n_b1f1b0(after)
        self._step_6_n_b1b0(self.rank + 1)
        self._step_7_n_wi0(after)
        self.actions += self.late_weights
        return self.actions

    def _step_1_n_f0(self, times: int) -> None:
        self.actions += [self._forward(0) for _ in range(times)]

    def _step_2_n_f0f1(self, times: int) -> None:
        for _ in range(times):
            self.actions += [self._forward(0), self._forward(1)]

    def _step_3_n_i1w1f1(self, times: int) -> None:
        for _ in range(times):
            self.actions += [self._input(1), self.late_weights.popleft(), self._forward(1)]

    def _step_4_n_f0b1f1b0(self, times: int) -> None:
        for turn in range(times):
            if turn == 0 and self.rank == self.pp_size - 1:
                # The turn of the V has nothing to gain here: its first backward is ready before this forward.
                self.actions += [self._forward(0), self._backward(1)]
            else:
                self.actions.append(ComposeAction((self._forward(0), self._backward(1))))
            self.actions.append(ComposeAction((self._forward(1), self._backward(0))))

    def _step_5_n_b1f1b0(self, times: int) -> None:
        for _ in range(times):
            self.actions += [self._backward(1), ComposeAction((self._forward(1), self._backward(0)))]

    def _step_6_n_b1b0(self, times: int) -> None:
        # From half of this step on, weight gradients wait, so that input gradients leave early.
        whole = 2 * (times // 2) + (self.rank + 1) % 2
        for turn in range(2 * times):
            chunk = 1 - turn % 2
            self.actions.append(self._backward(chunk) if turn < whole else self._input(chunk))

    def _step_7_n_wi0(self, times: int) -> None:
        for _ in range(times):
            self.actions += [self.late_weights.popleft(), self._input(0)]

    def _forward(self, chunk: int) -> ActionBase:
        self.forwards[chunk] += 1
        return forward(self.stages[chunk], self.forwards[chunk] - 1)

    def _backward(self, chunk: int) -> ActionBase:
        self.backwards[chunk] += 1
        return backward_full(self.stages[chunk], self.backwards[chunk] - 1)

    def _input(self, chunk: int) -> ActionBase:
        self.backwards[chunk] += 1
        self.late_weights.append(backward_weight(self.stages[chunk], self.backwards[chunk] - 1))
        return backward_input(self.stages[chunk], self.backwards[chunk] - 1)
