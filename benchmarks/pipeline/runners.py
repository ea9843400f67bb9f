"""Everything that is timed: one process, DDP, torch.distributed.pipelining, and ours."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
from hand_split import hand_split_step
from torch import nn
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.nn.parallel import DistributedDataParallel
from workload import NUM_BLOCKS, NUM_MICROBATCHES, StagedModel, Workload, loss_of

from d9d_lightning.runtime.groups import PipelineGroups
from d9d_lightning.runtime.pipeline import Pipeline
from d9d_lightning.schedule import Program, build_program
from d9d_lightning.values import Microbatch


@dataclass
class Runner:
    """One way to compute the gradients of the whole batch.

    Attributes:
        step: Forward and backward of the batch; gradients are accumulated.
        blocks: Global number to block, of those that this rank computes.
        pairs: Number of (stage, microbatch) pairs of this rank, where it is a pipeline.
    """

    step: Callable[[], object]
    blocks: dict[int, nn.Module] = field(default_factory=dict)
    pairs: int = 0

    def clear(self) -> None:
        for block in self.blocks.values():
            for parameter in block.parameters():
                parameter.grad = None


@dataclass(frozen=True)
class Pair:
    """A schedule of ours and torch's of the same kind: name, stages per rank, whether stages turn back on the way."""

    ours: str
    stages_per_rank: int
    folded: bool = False
    torch_name: str | None = None

    @property
    def label(self) -> str:
        return f"{self.ours} x{self.stages_per_rank}"

    def program(self, size: int) -> Program:
        chosen = {"stages_per_rank": self.stages_per_rank} if self.ours in _OPEN else {}
        return build_program(self.ours, pp_size=size, num_microbatches=NUM_MICROBATCHES, **chosen)


_OPEN = ("looped_bfs", "interleaved_1f1b", "zb1p")
"""Schedules for which the number of stages per rank is a choice."""

PAIRS = (
    Pair("gpipe", 1, torch_name="GPipe"),
    Pair("1f1b", 1, torch_name="1F1B"),
    Pair("looped_bfs", 2, torch_name="LoopedBFS"),
    Pair("interleaved_1f1b", 2, torch_name="Interleaved1F1B"),
    Pair("zb1p", 1, torch_name="InterleavedZeroBubble"),
    Pair("zb1p", 2, torch_name="InterleavedZeroBubble"),
    Pair("zbv", 2, True, "ZBVZeroBubble"),
    Pair("dualpipev", 2, True, "DualPipeV"),
    Pair("zb_h1", 1),
    Pair("zb_h2", 1),
    Pair("v_half", 2, True),
    Pair("v_min", 2, True),
)


def one_process(work: Workload) -> Runner:
    """The whole batch on every rank at once: twice the work, so it shows what the machine allows."""
    stages = work.cut(1)
    model, batch = StagedModel(stages), work.microbatches

    def step() -> None:
        for x, y in batch:
            (loss_of(model(x), y) / NUM_MICROBATCHES).backward()

    return Runner(step, _blocks_of(stages, range(1)))


def data_parallel(work: Workload) -> Runner:
    """The same global batch, half of it on each rank."""
    stages = work.cut(1)
    model = DistributedDataParallel(StagedModel(stages))
    batch = work.microbatches[dist.get_rank() :: dist.get_world_size()]

    def step() -> None:
        for number, (x, y) in enumerate(batch):
            last = number == len(batch) - 1
            with contextlib.nullcontext() if last else model.no_sync():
                (loss_of(model(x), y) / len(batch)).backward()

    return Runner(step, _blocks_of(stages, range(1)))


def torch_pipeline(work: Workload, pair: Pair) -> Runner:
    """torch.distributed.pipelining on stages split by hand."""
    rank, size = dist.get_rank(), dist.get_world_size()
    program = pair.program(size)
    stages = work.cut(program.num_stages)
    own = [stage for stage, host in enumerate(program.stage_to_rank) if host == rank]
    parts = [torch_pipelining.PipelineStage(stages[s], s, len(stages), torch.device("cpu")) for s in own]
    kind = get_schedule_class(pair.torch_name)
    single = issubclass(kind, PipelineScheduleSingle)
    schedule = kind(parts[0] if single else parts, NUM_MICROBATCHES, loss_fn=loss_of)
    given = (work.x,) if 0 in own else ()
    target = {"target": work.y} if len(stages) - 1 in own else {}
    return Runner(
        lambda: schedule.step(*given, return_outputs=False, **target),
        _blocks_of(stages, own),
        len(own) * NUM_MICROBATCHES,
    )


def our_hand_split(work: Workload, pair: Pair, groups: PipelineGroups) -> Runner:
    """Our executor on stages split by hand, as torch's runners have them."""
    return _ours(work, pair, groups, replayed=False)


def our_pipeline(work: Workload, pair: Pair, groups: PipelineGroups) -> Runner:
    """Ours without the Trainer: the user's step is replayed, the module is whole, the units are the stages."""
    return _ours(work, pair, groups, replayed=True)


def _ours(work: Workload, pair: Pair, groups: PipelineGroups, replayed: bool) -> Runner:
    rank, size = dist.get_rank(), dist.get_world_size()
    program = pair.program(size)
    stages = work.cut(program.num_stages)
    model = StagedModel(stages)
    pipeline = Pipeline(
        model, stage_to_rank=program.stage_to_rank, rank=rank, size=size, groups=groups, units=["stages.*"]
    )
    batch = [Microbatch(i, len(x), ((x, y), 0)) for i, (x, y) in enumerate(work.microbatches)]
    pipeline.place(lambda microbatch: _user_step(model, microbatch), batch)
    own = pipeline.own_stages
    if replayed:

        def run() -> object:
            return pipeline.run(
                lambda microbatch: _user_step(model, microbatch),
                batch,
                program,
                finish=lambda _, loss: loss / NUM_MICROBATCHES,
            )
    else:
        described = pipeline.planner.describe("training_step", batch[:1])[0]
        plan = pipeline.planner.plan(lambda microbatch: _user_step(model, microbatch), described)
        run = hand_split_step(
            program,
            rank,
            {stage: stages[stage] for stage in own},
            plan,
            batch,
            lambda microbatch, output: loss_of(output, microbatch.args[0][1]) / NUM_MICROBATCHES,
            groups,
        )
    return Runner(run, _blocks_of(stages, own), len(own) * NUM_MICROBATCHES)


def _user_step(model: nn.Module, microbatch: Microbatch) -> torch.Tensor:
    x, y = microbatch.args[0]
    return loss_of(model(x), y)


def make_groups() -> PipelineGroups:
    """The groups of one pipeline over all ranks."""
    ranks = list(range(dist.get_world_size()))
    forward, backward, control, lockstep = (dist.new_group(ranks) for _ in range(4))
    return PipelineGroups(forward, backward, control, lockstep, tuple(ranks))


def _blocks_of(stages: nn.ModuleList, own: object) -> dict[int, nn.Module]:
    per_stage = NUM_BLOCKS // len(stages)
    return {s * per_stage + i: block for s in own for i, block in enumerate(stages[s])}  # type: ignore[attr-defined]
