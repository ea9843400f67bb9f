"""All ranks of a pipeline in one process, in simulated order, with no process group.

The stages share one module object, as two V stages of one rank do, so gradients add up in the module's own parameters
and can be compared with plain autograd one by one. While a rank computes, the parameters that it would not hold in a
process of its own are placeholders.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from d9d_lightning.errors import PlaceholderReadError, ScheduleDeadlockError, UnplannedCallError
from d9d_lightning.partition.placeholder import Placeholder
from d9d_lightning.partition.plan import parameter_stages
from d9d_lightning.runtime.executor import Observer, PipelineExecutor
from d9d_lightning.schedule import ActionBase, ActionKind, Program
from d9d_lightning.stage.planner import Planner
from d9d_lightning.stage.recomputation import Recomputation, find_recomputed, matching_modules
from d9d_lightning.stage.replay import Replay, StepCall
from d9d_lightning.stage.script import StageScript, make_script
from d9d_lightning.stage.stage import Finish, PipelineStage
from d9d_lightning.stage.world import PrivateWorld
from d9d_lightning.testing.mailbox import Mailbox, MailboxTransport
from d9d_lightning.values import Microbatch, Plan

__all__ = ["LocalPipeline", "LocalRun"]


@dataclass
class LocalRun:
    """What one step left behind.

    Attributes:
        outputs: What the user's step returned for each microbatch.
        stages: All stages, to look at what they kept.
        peak_graphs: For each rank, the largest number of forward graphs it held at once.
    """

    outputs: list[Any] = field(default_factory=list)
    stages: list[PipelineStage] = field(default_factory=list)
    peak_graphs: list[int] = field(default_factory=list)


class LocalPipeline:
    """A pipeline of one process.

    Args:
        module: The user's module.
        planner: Its planner; made from the module where None.
        recomputed: Modules that run again in the backward pass, as ``matching_modules`` takes them.
    """

    def __init__(self, module: nn.Module, planner: Planner | None = None, recomputed: Any = ()) -> None:
        self.module = module
        self.planner = planner or Planner(module)
        self._recomputed = matching_modules(module, recomputed)
        self._scripts: dict[tuple[str, int, bool], StageScript] = {}

    def run(
        self,
        step: StepCall,
        microbatches: Sequence[Microbatch],
        program: Program,
        finish: Finish,
        *,
        kind: str = "training_step",
        observer: Observer | None = None,
    ) -> LocalRun:
        """Run one step of all ranks.

        Args:
            step: Calls the user's step for one microbatch.
            microbatches: The slices of the batch.
            program: What every rank does.
            finish: From the step's result to the scalar to differentiate.
            kind: Name of the step.
            observer: Told of progress.

        Raises:
            ScheduleDeadlockError: No rank can go on.
            Exception: The first failure of any stage.
        """
        if self.planner.placement is None:
            self.planner.place(step, microbatches[0], program.stage_to_rank)
        backup = {p: None if p.grad is None else p.grad.clone() for p in self.module.parameters()}
        try:
            return self._run_once(step, microbatches, program, finish, kind, observer, fresh=False)
        except (UnplannedCallError, PlaceholderReadError):
            for parameter, gradient in backup.items():
                parameter.grad = gradient
            return self._run_once(step, microbatches, program, finish, kind, observer, fresh=True)

    def _run_once(
        self,
        step: StepCall,
        microbatches: Sequence[Microbatch],
        program: Program,
        finish: Finish,
        kind: str,
        observer: Observer | None,
        *,
        fresh: bool,
    ) -> LocalRun:
        described = self.planner.describe(kind, microbatches)
        plans = [self.planner.plan(step, microbatch, fresh=fresh) for microbatch in described]
        outputs: list[Any] = [None] * len(microbatches)  # not the run itself, which holds the stages that call keep
        result = LocalRun(outputs)

        def keep(microbatch: Microbatch, output: Any) -> Tensor | None:
            outputs[microbatch.index] = output
            return finish(microbatch, output)

        names = tuple(dict.fromkeys(name for plan in plans for name in plan.trace.changed_state))
        worlds = [PrivateWorld(self.module, names) if names else None for _ in range(program.num_stages)]
        result.stages = [
            PipelineStage(stage, self._replays(plans, stage, worlds[stage]), step, microbatches, keep)
            for stage in range(program.num_stages)
        ]
        absent = [self._find_absent(plans, program, rank) for rank in range(program.pp_size)]
        mailbox = Mailbox()
        executors = [
            PipelineExecutor(
                rank,
                program,
                {stage: result.stages[stage] for stage in program.stages_of_rank[rank]},
                MailboxTransport(mailbox),
                observer,
            )
            for rank in range(program.pp_size)
        ]
        recomputation = Recomputation(find_recomputed(self.module, self.planner.units, self._recomputed))
        with recomputation.installed(), self.planner.interceptor.installed():
            self._run_interleaved(executors, absent, program, mailbox, result)
        failures = [executor.failure for executor in executors if executor.failure is not None]
        for failure in failures:  # an unplanned call outweighs what may have come of it
            if isinstance(failure, UnplannedCallError | PlaceholderReadError):
                raise failure
        if failures:
            raise failures[0]
        if worlds[-1] is not None:
            worlds[-1].commit()
        return result

    def _replays(self, plans: Sequence[Plan], stage: int, world: PrivateWorld | None) -> list[Replay]:
        replays = {}
        for plan in plans:
            key = (plan.digest, stage, torch.is_grad_enabled())
            if key not in self._scripts:
                self._scripts[key] = make_script(plan, stage)
            if id(plan) not in replays:
                replays[id(plan)] = Replay(self.module, self.planner.interceptor, self._scripts[key], world)
        return [replays[id(plan)] for plan in plans]

    def _find_absent(self, plans: Sequence[Plan], program: Program, rank: int) -> list[_Absent]:
        """Where the module holds parameters that a rank would not have, and what it would have instead."""
        held: set[str] = set()
        for plan in {plan.digest: plan for plan in plans}.values():
            stages = parameter_stages(self.module, self.planner.units, plan.trace, plan.placement)
            held |= {name for name, found in stages.items() if {program.stage_to_rank[s] for s in found} & {rank}}
        absent = {}
        for name, parameter in self.module.named_parameters():
            if name not in held:
                stand_in = Placeholder.like(parameter.detach(), name)
                absent[id(parameter)] = nn.Parameter(stand_in, parameter.requires_grad)
        return [
            _Absent(module, name, parameter, absent[id(parameter)])
            for module in self.module.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in absent
        ]

    def _run_interleaved(
        self,
        executors: Sequence[PipelineExecutor],
        absent: Sequence[Sequence[_Absent]],
        program: Program,
        mailbox: Mailbox,
        result: LocalRun,
    ) -> None:
        left = [list(executor.actions) for executor in executors]
        result.peak_graphs = [0] * len(executors)
        while any(left):
            progress = False
            for rank, (executor, actions) in enumerate(zip(executors, left, strict=True)):
                while actions and _can_run(actions[0], program, mailbox):
                    with _without(absent[rank]):
                        executor.execute(actions.pop(0))
                    progress = True
                    held = sum(len(result.stages[s]._graphs) for s in program.stages_of_rank[rank])
                    result.peak_graphs[rank] = max(result.peak_graphs[rank], held)
            if not progress:
                waiting = ", ".join(f"rank {r}: {actions[0]}" for r, actions in enumerate(left) if actions)
                raise ScheduleDeadlockError(f"every rank waits: {waiting}")


@dataclass(frozen=True)
class _Absent:
    """A parameter that a rank does not hold, at one of its places in the module."""

    module: nn.Module
    name: str
    parameter: nn.Parameter
    stand_in: nn.Parameter


@contextlib.contextmanager
def _without(absent: Sequence[_Absent]) -> Iterator[None]:
    for place in absent:
        place.module._parameters[place.name] = place.stand_in
    try:
        yield
    finally:
        for place in absent:
            place.module._parameters[place.name] = place.parameter


def _can_run(action: ActionBase, program: Program, mailbox: Mailbox) -> bool:
    """Whether what the action consumes has arrived."""
    for part in action.parts if action.kind is ActionKind.OVERLAP else (action,):
        stage, last = part.stage, program.num_stages - 1
        ranks = program.stage_to_rank
        if part.kind is ActionKind.F and stage > 0 and ranks[stage - 1] != ranks[stage]:
            needed = ("forward", stage, part.microbatch)
        elif part.kind in (ActionKind.B, ActionKind.I) and stage < last and ranks[stage + 1] != ranks[stage]:
            needed = ("backward", stage, part.microbatch)
        else:
            continue
        if needed not in mailbox.messages:
            return False
    return True
