"""One measured step against what the simulator says about the same program.

From the records of all ranks: what each action of each stage costs, how long each rank idles and waits, and what the
program would take if every action cost exactly that. The gap between the two is what the runtime loses.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from d9d_lightning.errors import PipelineStateError
from d9d_lightning.runtime.recorder import StepRecord
from d9d_lightning.schedule import ActionKind, Costs, Program, Simulation, parse_action, simulate

__all__ = ["RankFigures", "StepReport", "compare_step", "measure_costs"]


@dataclass(frozen=True)
class RankFigures:
    """One rank in one step, in seconds and shares of the step.

    Attributes:
        rank: Rank in the pipeline.
        work: Time in which its compute actions computed.
        wait: Time in which it waited for tensors of other ranks.
        bubble: Share of the measured step in which it did not compute.
        predicted_bubble: The same share in the simulated step.
    """

    rank: int
    work: float
    wait: float
    bubble: float
    predicted_bubble: float


@dataclass(frozen=True)
class StepReport:
    """Outcome of :func:`compare_step`.

    Attributes:
        records: What was measured, by rank.
        simulation: The same program under the measured costs.
        costs: The measured costs; give them to ``build_program("auto", costs=..., stages_per_rank=...)`` to plan with
            them.
        span: Seconds from the first start to the last end of all compute actions.
        ranks: Figures of every rank.
        slowest_stage: The stage whose actions of one microbatch take longest.
    """

    records: tuple[StepRecord, ...]
    simulation: Simulation
    costs: Costs
    span: float
    ranks: tuple[RankFigures, ...]
    slowest_stage: int

    @property
    def bubble(self) -> float:
        """Mean measured bubble of the ranks."""
        return statistics.fmean(figures.bubble for figures in self.ranks)

    def text(self) -> str:
        """A readable table."""
        lines = [
            f"step {self.span * 1e3:.2f} ms, simulated {self.simulation.span * 1e3:.2f} ms; bubble {self.bubble:.1%}, "
            f"simulated {self.simulation.bubble_rate:.1%}; slowest stage {self.slowest_stage}",
            f"{'rank':>4} {'work ms':>9} {'wait ms':>9} {'bubble':>8} {'simulated':>9}",
        ]
        for figures in self.ranks:
            lines.append(
                f"{figures.rank:>4} {figures.work * 1e3:>9.2f} {figures.wait * 1e3:>9.2f} "
                f"{figures.bubble:>8.1%} {figures.predicted_bubble:>9.1%}"
            )
        return "\n".join(lines)


def compare_step(program: Program, records: Sequence[StepRecord]) -> StepReport:
    """Set the records of one step beside the simulation of its program.

    Args:
        program: The program that was run.
        records: The record of every rank, in any order.

    Raises:
        PipelineStateError: A rank's record is missing, or is of another program.
    """
    ordered = tuple(sorted(records, key=lambda record: record.rank))
    _check(program, ordered)
    costs = measure_costs(program, ordered)
    simulation = simulate(program, costs, check=False)
    compute = [[span for span in record.spans if parse_action(span.action).kind.is_compute] for record in ordered]
    begin = min(spans[0].start + spans[0].wait for spans in compute)
    span = max(spans[-1].end for spans in compute) - begin
    ranks = []
    for record, spans, predicted in zip(ordered, compute, simulation.work, strict=True):
        work = sum(each.work for each in spans)
        wait = sum(each.wait for each in record.spans) + record.final_wait
        bubble, ideal = 1 - work / span, 1 - predicted / simulation.span
        ranks.append(RankFigures(record.rank, work, wait, bubble, ideal))
    return StepReport(ordered, simulation, costs, span, tuple(ranks), _find_slowest_stage(program, ordered))


def measure_costs(program: Program, records: Sequence[StepRecord]) -> Costs:
    """The median time of each kind of action on each stage.

    Where a program has full backwards only, input and weight gradients are taken as half of one each; where it has
    split ones only, a full one is their sum.
    """
    times: dict[tuple[ActionKind, int], list[float]] = defaultdict(list)
    for record in records:
        for span in record.spans:
            action = parse_action(span.action)
            if action.kind.is_compute:
                times[action.kind, action.stage].append(span.work)
    stages = range(program.num_stages)

    def median(kind: ActionKind, stage: int, otherwise: float) -> float:
        found = times.get((kind, stage))
        return max(0.0, statistics.median(found)) if found else otherwise

    full = [median(ActionKind.B, stage, 0.0) for stage in stages]
    inputs = [median(ActionKind.I, stage, full[stage] / 2) for stage in stages]
    weights = [median(ActionKind.W, stage, full[stage] / 2) for stage in stages]
    full = [whole or inputs[stage] + weights[stage] for stage, whole in enumerate(full)]
    forward = [median(ActionKind.F, stage, 0.0) for stage in stages]
    # the backward of a pair belongs to another stage; with none measured the parts are added up
    overlap = [median(ActionKind.OVERLAP, stage, forward[stage] + full[stage]) for stage in stages]
    has_pairs = any(kind is ActionKind.OVERLAP for kind, _ in times)
    return Costs(
        forward=forward,
        backward_input=inputs,
        backward_weight=weights,
        backward_full=full,
        overlap=overlap if has_pairs else None,
    )


def _find_slowest_stage(program: Program, records: Sequence[StepRecord]) -> int:
    totals = [0.0] * program.num_stages
    for record in records:
        for span in record.spans:
            action = parse_action(span.action)
            if action.kind.is_compute:
                # a pair cannot be divided by measuring it: half for each of its stages
                for part in action.parts:
                    totals[part.stage] += span.work / len(action.parts)
    return max(range(program.num_stages), key=totals.__getitem__)


def _check(program: Program, records: Sequence[StepRecord]) -> None:
    ranks = [record.rank for record in records]
    if ranks != list(range(program.pp_size)):
        raise PipelineStateError(
            f"Got records of ranks {ranks} for a program of {program.pp_size} ranks. Gather one from every rank, for "
            "example with torch.distributed.all_gather_object on the control group."
        )
    for record, actions in zip(records, program.actions, strict=True):
        expected, found = [str(action) for action in actions], [span.action for span in record.spans]
        if found != expected:
            raise PipelineStateError(
                f"The record of rank {record.rank} ({len(found)} actions: {' '.join(found[:6])} ...) is not of this "
                f"program ({len(expected)} actions: {' '.join(expected[:6])} ...). Give the program that was run."
            )
