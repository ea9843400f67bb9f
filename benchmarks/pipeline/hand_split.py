"""Our executor, stages and transport on stages split by hand: what torch's runners do, so no replay of a user's step.

The plan comes from a trace, as ever; :class:`HandSplitReplay` then calls the stage's module instead of the user's step.
Nothing is agreed between ranks before or after a step, since torch's runners agree on nothing either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from d9d_lightning.runtime.executor import PipelineExecutor
from d9d_lightning.runtime.groups import PipelineGroups
from d9d_lightning.runtime.transport import ProcessTransport
from d9d_lightning.schedule import Program
from d9d_lightning.stage.replay import ReplayResult, StepCall
from d9d_lightning.stage.script import StageScript, make_script
from d9d_lightning.stage.stage import Finish, PipelineStage
from d9d_lightning.values import Microbatch, Plan, ValueId


@dataclass(frozen=True)
class HandSplitReplay:
    """Stands where a replay of the user's step stands, and calls the stage itself."""

    script: StageScript
    module: nn.Module
    world: None = None

    def run(self, step: StepCall, microbatch: Microbatch, received: Mapping[ValueId, Tensor]) -> ReplayResult:
        x = next(iter(received.values())) if received else microbatch.args[0][0]
        output = self.module(x)
        sends = self.script.plan.boundaries[self.script.stage].sends
        return ReplayResult(dict.fromkeys(sends, output), output)


def hand_split_step(
    program: Program,
    rank: int,
    stages: Mapping[int, nn.Module],
    plan: Plan,
    batch: Sequence[Microbatch],
    finish: Finish,
    groups: PipelineGroups,
) -> Callable[[], None]:
    """One step of this rank: forward and backward of the whole batch."""
    transport = ProcessTransport(groups, program.stage_to_rank, torch.device("cpu"))
    replays = {stage: [HandSplitReplay(make_script(plan, stage), stages[stage])] * len(batch) for stage in stages}
    plans = [plan] * len(batch)

    def step() -> None:
        parts = {s: PipelineStage(s, replays[s], _no_step, batch, finish) for s in stages}  # type: ignore[arg-type]
        transport.begin(plans)
        executor = PipelineExecutor(rank, program, parts, transport)
        executor.run()
        if executor.failure is not None:
            raise executor.failure

    return step


def _no_step(microbatch: Microbatch) -> None:
    raise RuntimeError(f"microbatch {microbatch.index}: a stage split by hand has no user's step")
