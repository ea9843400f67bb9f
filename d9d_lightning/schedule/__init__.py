"""What happens on which rank in which order. Standard library only.

Reading order: ``actions`` -> ``topology`` -> ``engine`` -> ``communication`` -> ``program`` -> ``families/gpipe`` ->
``registry`` -> ``check`` -> ``simulate``.
"""

from __future__ import annotations

from d9d_lightning.schedule.actions import (
    ActionBase,
    ActionKind,
    BackwardFullInputComputeAction,
    BackwardReceiveAction,
    BackwardSendAction,
    BackwardWeightComputeAction,
    ComposeAction,
    ForwardComputeAction,
    ForwardReceiveAction,
    ForwardSendAction,
    parse_action,
)
from d9d_lightning.schedule.builder import ComputeOrderBuilder, PipelineProgramBuilder
from d9d_lightning.schedule.check import check_program
from d9d_lightning.schedule.choose import choose_num_microbatches, legal_fallback, predict_bubble
from d9d_lightning.schedule.communication import add_communication_ops
from d9d_lightning.schedule.costs import UNIT_COSTS, Costs
from d9d_lightning.schedule.families.forward_only import ForwardOnlyProgramBuilder
from d9d_lightning.schedule.families.gpipe import GPipeProgramBuilder
from d9d_lightning.schedule.families.one_f_one_b import OneForwardOneBackwardProgramBuilder
from d9d_lightning.schedule.families.zbv import ZeroBubbleVPipelineProgramBuilder
from d9d_lightning.schedule.program import Program
from d9d_lightning.schedule.registry import SCHEDULES, build_program, make_builder
from d9d_lightning.schedule.simulate import Idle, Simulation, simulate
from d9d_lightning.schedule.topology import (
    ScheduleStyle,
    build_host_rank_to_stage_topology,
    build_stage_to_host_rank_topology,
)

__all__ = [
    "SCHEDULES",
    "UNIT_COSTS",
    "ActionBase",
    "ActionKind",
    "BackwardFullInputComputeAction",
    "BackwardReceiveAction",
    "BackwardSendAction",
    "BackwardWeightComputeAction",
    "ComposeAction",
    "ComputeOrderBuilder",
    "Costs",
    "ForwardComputeAction",
    "ForwardOnlyProgramBuilder",
    "ForwardReceiveAction",
    "ForwardSendAction",
    "GPipeProgramBuilder",
    "Idle",
    "OneForwardOneBackwardProgramBuilder",
    "PipelineProgramBuilder",
    "Program",
    "ScheduleStyle",
    "Simulation",
    "ZeroBubbleVPipelineProgramBuilder",
    "add_communication_ops",
    "build_host_rank_to_stage_topology",
    "build_program",
    "build_stage_to_host_rank_topology",
    "check_program",
    "choose_num_microbatches",
    "legal_fallback",
    "make_builder",
    "parse_action",
    "predict_bubble",
    "simulate",
]
