"""Every schedule by name, and the one function that builds a program."""

from __future__ import annotations

from collections.abc import Callable

from d9d_lightning.errors import ScheduleError
from d9d_lightning.schedule.builder import PipelineProgramBuilder
from d9d_lightning.schedule.costs import UNIT_COSTS, Costs
from d9d_lightning.schedule.families.auto import AutomaticProgramBuilder
from d9d_lightning.schedule.families.dualpipev import DualPipeVProgramBuilder
from d9d_lightning.schedule.families.forward_only import ForwardOnlyProgramBuilder
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
from d9d_lightning.schedule.program import Program
from d9d_lightning.schedule.topology import ScheduleStyle, build_stage_to_host_rank_topology

__all__ = ["SCHEDULES", "build_program", "make_builder"]

SCHEDULES: dict[str, Callable[..., PipelineProgramBuilder]] = {
    "gpipe": GPipeProgramBuilder,
    "looped_bfs": LoopedBFSProgramBuilder,
    "1f1b": OneForwardOneBackwardProgramBuilder,
    "interleaved_1f1b": Interleaved1F1BProgramBuilder,
    "zb_h1": ZeroBubbleH1ProgramBuilder,
    "zb_h2": ZeroBubbleH2ProgramBuilder,
    "zb1p": InterleavedZeroBubbleProgramBuilder,
    "zbv": ZeroBubbleVPipelineProgramBuilder,
    "v_half": VHalfProgramBuilder,
    "v_min": VMinProgramBuilder,
    "dualpipev": DualPipeVProgramBuilder,
    "forward_only": ForwardOnlyProgramBuilder,
    "auto": AutomaticProgramBuilder,
}
"""Name to builder class. A new family is one file and one line here."""

_LOOPED = ("looped_bfs", "interleaved_1f1b", "zb1p")
"""Families of any number of stages per rank."""


def make_builder(
    name: str,
    *,
    stages_per_rank: int | None = None,
    style: ScheduleStyle | None = None,
    costs: Costs | None = None,
    max_activations: float | None = None,
    barrier: bool = False,
) -> PipelineProgramBuilder:
    """Builder of a schedule.

    Args:
        name: A key of :data:`SCHEDULES`.
        stages_per_rank: Number of stages per rank, where the family leaves a choice; the family's own by default.
        style: Placement, for ``forward_only``.
        costs: Costs of the actions of one stage, for ``auto``; a fixed schedule does not look at them.
        max_activations: The most that a rank may hold, in stage activations, for ``auto``.
        barrier: For ``auto``: make ``span`` short if true, else ``cost``.

    Raises:
        ScheduleError: An unknown name, or a number of stages or a placement that the family does not take.
    """
    if name not in SCHEDULES:
        raise ScheduleError(f"there is no schedule {name!r}; the names are {', '.join(SCHEDULES)}")
    options = _choose_options(name, stages_per_rank, style)
    if name == "auto":
        options |= {"costs": costs or UNIT_COSTS, "max_activations": max_activations, "barrier": barrier}
    builder = SCHEDULES[name](**options)
    if stages_per_rank is not None and builder.num_stages_per_rank != stages_per_rank:
        raise ScheduleError(
            f"schedule {name!r} has {builder.num_stages_per_rank} stage(s) per rank, got stages_per_rank="
            f"{stages_per_rank}; leave it out, or use looped_bfs, interleaved_1f1b or zb1p"
        )
    if style is not None and builder.topology_style is not style:
        raise ScheduleError(f"schedule {name!r} has the {builder.topology_style.name} placement, got {style.name}")
    return builder


def _choose_options(name: str, stages_per_rank: int | None, style: ScheduleStyle | None) -> dict[str, object]:
    """Arguments of a family that leaves its placement open."""
    if name == "forward_only":
        return {
            "stages_per_rank": 1 if stages_per_rank is None else stages_per_rank,
            "style": style or ScheduleStyle.loop,
        }
    if name == "auto" and stages_per_rank is None:
        return {"stages_per_rank": 2 if style is ScheduleStyle.v else 1}
    if name in (*_LOOPED, "auto") and stages_per_rank is not None:
        return {"stages_per_rank": stages_per_rank}
    return {}


def build_program(
    schedule: str | PipelineProgramBuilder,
    *,
    pp_size: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    style: ScheduleStyle | None = None,
    costs: Costs | None = None,
    max_activations: float | None = None,
    barrier: bool = False,
) -> Program:
    """Program of a schedule.

    Args:
        schedule: A key of :data:`SCHEDULES`, or a builder of your own.
        pp_size: Number of ranks.
        num_microbatches: Number of microbatches of one step.
        stages_per_rank, style, costs, max_activations, barrier: See :func:`make_builder`.

    Raises:
        ScheduleError: An unknown name, or numbers that the family does not take; says which and what to use instead.
    """
    _require_at_least_one(num_microbatches, pp_size)
    name = schedule if isinstance(schedule, str) else ""
    builder = (
        schedule
        if not isinstance(schedule, str)
        else make_builder(
            schedule,
            stages_per_rank=stages_per_rank,
            style=style,
            costs=costs,
            max_activations=max_activations,
            barrier=barrier,
        )
    )
    actions = builder.compose(num_microbatches, pp_size)
    num_stages = builder.num_stages_per_rank * pp_size
    placement = build_stage_to_host_rank_topology(pp_size, num_stages, builder.topology_style)
    return Program.from_actions(actions, tuple(placement.values()), num_microbatches, name)


def _require_at_least_one(num_microbatches: int, pp_size: int) -> None:
    if not all(isinstance(number, int) and number >= 1 for number in (num_microbatches, pp_size)):
        raise ScheduleError(
            f"a program needs whole numbers, at least 1 microbatch and 1 rank, got "
            f"num_microbatches={num_microbatches!r} and pp_size={pp_size!r}"
        )
