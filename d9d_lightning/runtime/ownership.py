"""Which rank has which parameter and buffer, and giving up those of other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from d9d_lightning.errors import PartitionError
from d9d_lightning.partition.placeholder import Placeholder
from d9d_lightning.partition.plan import parameter_stages
from d9d_lightning.runtime.groups import PipelineGroups
from d9d_lightning.schedule import Program
from d9d_lightning.values import Placement, Plan, Trace

__all__ = ["Ownership", "check_homes", "check_program", "find_ownership", "lent_parameters", "release_parameters"]


@dataclass(frozen=True)
class Ownership:
    """Pipeline ranks by qualified name.

    Attributes:
        parameters: Ranks that hold each parameter; the first one saves and counts it.
        buffers: The rank whose unit updates each buffer.
        stages: Stages that use each parameter. A later batch may add one, of a rank that has the parameter already.
    """

    parameters: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, int]
    stages: dict[str, tuple[int, ...]]


def find_ownership(
    root: nn.Module,
    units: Mapping[str, nn.Module],
    trace: Trace,
    placement: Placement,
    stage_to_rank: Sequence[int],
) -> Ownership:
    """Ranks of every parameter and buffer under a placement."""
    stages = parameter_stages(root, units, trace, placement)
    parameters = {name: tuple(dict.fromkeys(stage_to_rank[stage] for stage in found)) for name, found in stages.items()}
    unit_of: dict[int, str] = {}
    for name, module in units.items():
        for buffer in module.buffers():
            unit_of.setdefault(id(buffer), name)
    last = stage_to_rank[-1]
    buffers = {
        name: stage_to_rank[placement.stage_of(unit_of[id(buffer)])] if id(buffer) in unit_of else last
        for name, buffer in root.named_buffers()
    }
    return Ownership(parameters, buffers, stages)


def check_homes(
    root: nn.Module, units: Mapping[str, nn.Module], plan: Plan, ownership: Ownership, stage_to_rank: Sequence[int]
) -> None:
    """Note on which stages a plan reads each parameter; refuse one that reads it where the placement did not put it.

    Raises:
        PartitionError: Names the parameter, the stage and the ranks that hold it.
    """
    for name, stages in parameter_stages(root, units, plan.trace, plan.placement).items():
        for stage in stages:
            if stage_to_rank[stage] not in ownership.parameters[name]:
                raise PartitionError(
                    f"the step now reads parameter {name!r} on stage {stage}, but it lives on ranks "
                    f"{list(ownership.parameters[name])}, as the step of the first batch decided. Expected: the "
                    "same uses of parameters outside their own units in every batch; give an example_batch=... to "
                    "D9DStrategy that shows all of them."
                )
        ownership.stages[name] = tuple(sorted({*ownership.stages[name], *stages}))


def check_program(program: Program, stage_to_rank: Sequence[int]) -> None:
    """Refuse a program of another placement.

    Raises:
        PartitionError: Shows both.
    """
    if tuple(program.stage_to_rank) != tuple(stage_to_rank):
        raise PartitionError(
            f"the program places its stages on ranks {list(program.stage_to_rank)}, the pipeline on "
            f"{list(stage_to_rank)}; build the program for the same schedule family"
        )


@contextlib.contextmanager
def lent_parameters(
    root: nn.Module, names: Sequence[str], ownership: Ownership, rank: int, groups: PipelineGroups
) -> Iterator[None]:
    """Give every rank the named parameters for a while; collective over the pipeline."""
    returned: list[tuple[nn.Module, str, nn.Parameter]] = []
    lent: dict[int, nn.Parameter] = {}
    for name in names:
        owner = ownership.parameters[name][0]
        parameter = root.get_parameter(name)
        sent = groups.broadcast(parameter.detach().cpu() if rank == owner else None, owner, lockstep=True)
        if isinstance(parameter, Placeholder):
            lent[id(parameter)] = nn.Parameter(sent.to(parameter.device), parameter.requires_grad)
    try:
        for module in root.modules():
            for name, held in module._parameters.items():
                if held is not None and id(held) in lent:
                    returned.append((module, name, held))
                    module._parameters[name] = lent[id(held)]
        yield
    finally:
        for module, name, held in returned:
            module._parameters[name] = held


def release_parameters(root: nn.Module, ownership: Ownership, rank: int, device: torch.device) -> None:
    """Put placeholders in the place of parameters that this rank does not hold; their memory is freed."""
    given_up: dict[int, nn.Parameter] = {}
    for name, parameter in root.named_parameters():
        if rank not in ownership.parameters[name] and not isinstance(parameter, Placeholder):
            stand_in = Placeholder.like(parameter.detach(), name, device)
            given_up[id(parameter)] = nn.Parameter(stand_in, parameter.requires_grad)
    for module in root.modules():
        for name, held in module._parameters.items():
            if held is not None and id(held) in given_up:
                module._parameters[name] = given_up[id(held)]
