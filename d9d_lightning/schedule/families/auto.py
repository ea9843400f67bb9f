"""auto: searches an order for the given costs under a memory limit, and never does worse than a fixed schedule."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from d9d_lightning.errors import ScheduleError
from d9d_lightning.schedule.actions import ActionBase
from d9d_lightning.schedule.builder import ComputeOrderBuilder
from d9d_lightning.schedule.costs import UNIT_COSTS, Costs
from d9d_lightning.schedule.families.dualpipev import DualPipeVProgramBuilder
from d9d_lightning.schedule.families.gpipe import GPipeProgramBuilder
from d9d_lightning.schedule.families.interleaved_1f1b import Interleaved1F1BProgramBuilder
from d9d_lightning.schedule.families.looped_bfs import LoopedBFSProgramBuilder
from d9d_lightning.schedule.families.one_f_one_b import OneForwardOneBackwardProgramBuilder
from d9d_lightning.schedule.families.v_half import VHalfProgramBuilder
from d9d_lightning.schedule.families.v_min import VMinProgramBuilder
from d9d_lightning.schedule.families.zb1p import InterleavedZeroBubbleProgramBuilder
from d9d_lightning.schedule.families.zb_h1 import ZeroBubbleH1ProgramBuilder
from d9d_lightning.schedule.families.zb_h2 import ZeroBubbleH2ProgramBuilder
from d9d_lightning.schedule.families.zbv import ZeroBubbleVPipelineProgramBuilder
from d9d_lightning.schedule.search.problem import EPSILON, OrderProblem, codes_of
from d9d_lightning.schedule.search.rounds import propose_rounds
from d9d_lightning.schedule.search.solve import find_order
from d9d_lightning.schedule.search.weave import to_actions
from d9d_lightning.schedule.simulate import measure_orders
from d9d_lightning.schedule.topology import ScheduleStyle, build_stage_to_host_rank_topology

__all__ = ["AutomaticProgramBuilder"]

Orders = list[list[ActionBase]]


class AutomaticProgramBuilder(ComputeOrderBuilder):
    """Cost-aware and memory-limited, for one stage per rank in a loop or two in a V.

    It clocks every fixed schedule of the placement that fits in the memory limit, searches for an order around the
    best ones (weight gradients fill gaps, after the automatic schedule of Qi et al., arXiv 2401.10241, section 4.3;
    local search moves forwards and input gradients), and returns the fastest. The answer depends on its arguments
    only, so every rank comes to the same.

    4 ranks, 8 microbatches, F = I = W::

        0 FFFF...IWFIWFIWFIWFIWIWIWIW
          0123   00411522633744556677
        1 .FFF..IFIWFIWFIWFIWFIWIWIWW
           012  031042153264375465767
        2 ..FF.IFIFIWFIWFIWFIWFIWIWWW
            01 0213204315426537647567
        3 ...FIFIFIFIWFIWFIWFIWFIWWWW
             001122330441552663774567

    Bubble and memory are those of the order found: at most those of the best fixed schedule within the limit.

    Args:
        costs: Time and memory of the actions of one stage.
        stages_per_rank: 1 (loop) or 2 (V).
        max_activations: The most that a rank may hold, in stage activations; by default as much as 1F1B.
        barrier: Make the step with a barrier (``span``) short if true, else the one without (``cost``).
        effort: Multiple of the usual search effort.
    """

    name = "auto"

    def __init__(
        self,
        costs: Costs = UNIT_COSTS,
        stages_per_rank: int = 1,
        max_activations: float | None = None,
        barrier: bool = False,
        effort: float = 1.0,
    ) -> None:
        if stages_per_rank not in (1, 2):
            raise ScheduleError(f"schedule 'auto' takes stages_per_rank=1 (loop) or 2 (V), got {stages_per_rank}")
        self._costs, self._stages_per_rank = costs, stages_per_rank
        self._max_activations, self._barrier, self._effort = max_activations, barrier, effort

    @property
    def is_measured(self) -> bool:
        """Whether it was given costs of its own."""
        return self._costs != UNIT_COSTS

    def with_costs(self, costs: Costs) -> AutomaticProgramBuilder:
        """The same with other costs, for steps that end with all ranks meeting."""
        return AutomaticProgramBuilder(costs, self._stages_per_rank, self._max_activations, True, self._effort)

    @property
    def num_stages_per_rank(self) -> int:
        """Number of stages that each rank hosts."""
        return self._stages_per_rank

    @property
    def topology_style(self) -> ScheduleStyle:
        """A loop of one stage per rank, or a V of two."""
        return ScheduleStyle.loop if self._stages_per_rank == 1 else ScheduleStyle.v

    def order(self, num_microbatches: int, pp_size: int) -> Orders:
        """The fastest order that the search or a fixed schedule gives.

        Raises:
            ScheduleError: The memory limit is below what one microbatch needs.
        """
        num_stages = pp_size * self._stages_per_rank
        limit = float(num_stages) if self._max_activations is None else float(self._max_activations)
        placement = build_stage_to_host_rank_topology(pp_size, num_stages, self.topology_style)
        problem = OrderProblem(
            pp_size,
            num_microbatches,
            tuple(placement.values()),
            self._costs.for_stages(num_stages),
            limit,
            self._barrier,
        )
        return [list(order) for order in _solve(problem, self._effort)]


@functools.lru_cache(maxsize=64)
def _solve(problem: OrderProblem, effort: float) -> tuple[tuple[ActionBase, ...], ...]:
    """Cached: strategies build the same program for prediction, checks and training."""
    fixed = list(_fixed_orders(problem))
    found = find_order(problem, map(codes_of, fixed), effort)
    candidates = [*fixed, *([to_actions(found)] if found is not None else [])]
    best: Orders | None = None
    best_time = 0.0
    for orders in candidates:
        span, cost, peak = measure_orders(orders, problem.rank_of, problem.costs)
        time = span if problem.barrier else cost
        if peak <= problem.limit + EPSILON and (best is None or time < best_time - EPSILON):
            best, best_time = orders, time
    if best is None:
        raise ScheduleError(
            f"no schedule of {problem.num_ranks} ranks and {problem.num_microbatches} microbatches holds at most "
            f"{problem.limit:g} stage activations on a rank; raise max_activations"
        )
    return tuple(map(tuple, best))


def _fixed_orders(problem: OrderProblem) -> Iterator[Orders]:
    builders: tuple[ComputeOrderBuilder, ...]
    if problem.num_stages == problem.num_ranks:
        builders = (
            OneForwardOneBackwardProgramBuilder(),
            GPipeProgramBuilder(),
            LoopedBFSProgramBuilder(1),
            Interleaved1F1BProgramBuilder(1),
            InterleavedZeroBubbleProgramBuilder(1),
            ZeroBubbleH1ProgramBuilder(),
            ZeroBubbleH2ProgramBuilder(),
        )
    else:
        builders = (
            ZeroBubbleVPipelineProgramBuilder(),
            VHalfProgramBuilder(),
            VMinProgramBuilder(),
            DualPipeVProgramBuilder(),
        )
    for builder in builders:
        try:
            builder.require(problem.num_microbatches, problem.num_ranks)
        except ScheduleError:
            continue
        yield builder.order(problem.num_microbatches, problem.num_ranks)
    if problem.num_stages == problem.num_ranks and problem.limit >= max(problem.costs.activation):
        yield from map(to_actions, propose_rounds(problem))
