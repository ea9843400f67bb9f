"""All schedules side by side for given costs and memory, and which one to take."""

from __future__ import annotations

from dataclasses import dataclass

from d9d_lightning.errors import ScheduleError
from d9d_lightning.schedule.costs import Costs
from d9d_lightning.schedule.registry import SCHEDULES, build_program
from d9d_lightning.schedule.search.problem import EPSILON
from d9d_lightning.schedule.simulate import Simulation, simulate

__all__ = ["Comparison", "ComparisonRow", "compare_schedules"]


@dataclass(frozen=True)
class ComparisonRow:
    """One schedule in a comparison.

    Attributes:
        label: Name, with the number of stages per rank where it is a choice.
        simulation: Its run; None where the schedule does not take these numbers.
        fits: Whether it stays within the memory limit.
        problem: Why it cannot be taken; empty where it can.
    """

    label: str
    simulation: Simulation | None
    fits: bool
    problem: str = ""


@dataclass(frozen=True)
class Comparison:
    """All schedules for the same ranks, microbatches, costs and memory.

    Attributes:
        rows: One per schedule.
        barrier: Whether the step with a barrier decides.
    """

    rows: tuple[ComparisonRow, ...]
    barrier: bool

    @property
    def best(self) -> ComparisonRow:
        """The fastest row that fits; a fixed schedule before ``auto`` where they are equally fast.

        Raises:
            ScheduleError: Nothing fits.
        """
        fitting = [row for row in self.rows if row.fits and row.simulation is not None]
        if not fitting:
            raise ScheduleError("no schedule fits in this memory; raise the limit or use more ranks")
        return min(fitting, key=lambda row: (round(self.time(row), 9), row.label.startswith("auto")))

    def time(self, row: ComparisonRow) -> float:
        """The makespan that decides."""
        if row.simulation is None:
            raise ScheduleError(f"{row.label} was not run: {row.problem}")
        return row.simulation.span if self.barrier else row.simulation.cost

    def text(self) -> str:
        """The table, and a last line that says which to take."""
        lines = ["schedule              span     bubble   no barrier  bubble   peak (rank activations)"]
        for row in self.rows:
            run = row.simulation
            if run is None:
                lines.append(f"{row.label:20s}  -- {row.problem}")
                continue
            peak = max(run.peak_activations) * run.program.pp_size / run.program.num_stages
            lines.append(
                f"{row.label:20s}  {run.span:<8.5g} {run.bubble_rate:6.1%}   {run.cost:<10.5g}  "
                f"{run.bubble_rate_without_barrier:6.1%}   {peak:.4g}{'' if row.fits else '  too much memory'}"
            )
        best = self.best
        with_barrier = "with" if self.barrier else "without"
        lines.append(f"take: {best.label} ({self.time(best):.5g} {with_barrier} a barrier at the optimizer step)")
        return "\n".join(lines) + "\n"


def compare_schedules(
    *,
    pp_size: int,
    num_microbatches: int,
    costs: Costs,
    max_activations: float | None = None,
    barrier: bool = True,
) -> Comparison:
    """Run every training schedule under the same costs.

    Args:
        pp_size: Number of ranks.
        num_microbatches: Number of microbatches.
        costs: Time of the actions of a whole rank; a stage of a rank with v stages takes 1/v of it.
        max_activations: The most that a rank may hold, in activations of a whole rank; no limit by default, except
            for ``auto``, which then takes as much as 1F1B.
        barrier: Whether the step with a barrier decides.
    """
    rows = []
    for name in SCHEDULES:
        if name == "forward_only":
            continue
        for stages in (1, 2) if name == "auto" else (None,):
            rows.append(_run(name, stages, pp_size, num_microbatches, costs, max_activations, barrier))
    return Comparison(tuple(rows), barrier)


def _run(
    name: str,
    stages: int | None,
    pp_size: int,
    num_microbatches: int,
    costs: Costs,
    max_activations: float | None,
    barrier: bool,
) -> ComparisonRow:
    per_rank = stages or (1 if name in ("gpipe", "1f1b", "zb_h1", "zb_h2") else 2)
    label = name if stages is None else f"{name} (v={stages})"
    stage_costs = costs.divide(per_rank)
    limit = None if max_activations is None else max_activations * per_rank
    try:
        program = build_program(
            name,
            pp_size=pp_size,
            num_microbatches=num_microbatches,
            stages_per_rank=stages,
            costs=stage_costs,
            max_activations=limit,
            barrier=barrier,
        )
    except ScheduleError as error:
        return ComparisonRow(label, None, False, str(error))
    run = simulate(program, stage_costs, check=False)
    fits = limit is None or max(run.peak_activations) <= limit + EPSILON
    return ComparisonRow(label, run, fits)
