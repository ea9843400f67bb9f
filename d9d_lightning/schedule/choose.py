"""Which program to run: a legal one of the same placement, and a number of microbatches that keeps ranks busy."""

from __future__ import annotations

from d9d_lightning.errors import ScheduleError
from d9d_lightning.schedule.builder import PipelineProgramBuilder
from d9d_lightning.schedule.costs import UNIT_COSTS, Costs
from d9d_lightning.schedule.registry import build_program
from d9d_lightning.schedule.simulate import simulate

__all__ = ["choose_num_microbatches", "legal_fallback", "predict_bubble"]

_FALLBACKS = {
    "dualpipev": "zbv",
    "zb_h2": "zb_h1",
    "interleaved_1f1b": "looped_bfs",
    "zb1p": "looped_bfs",
}
_LONGEST = 4
"""The automatic number of microbatches is at most this many times the number of ranks."""


def legal_fallback(name: str, pp_size: int, num_microbatches: int, stages_per_rank: int | None = None) -> str:
    """The schedule itself where it takes these numbers, else one of the same placement that takes any.

    Args:
        name: Name of the wanted schedule.
        pp_size: Number of ranks.
        num_microbatches: Number of microbatches of one step.
        stages_per_rank: Number of stages per rank, where the family leaves a choice.

    Raises:
        ScheduleError: The numbers are not legal for the fallback either (below 1, or a wrong number of stages).
    """
    try:
        build_program(name, pp_size=pp_size, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank)
    except ScheduleError:
        if name not in _FALLBACKS:
            raise
        fallback = _FALLBACKS[name]
        build_program(fallback, pp_size=pp_size, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank)
        return fallback
    return name


def predict_bubble(
    schedule: str | PipelineProgramBuilder,
    *,
    pp_size: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    costs: Costs = UNIT_COSTS,
) -> float:
    """Share of a step with a barrier at its end in which a rank idles.

    A number of microbatches that the family forbids is predicted for :func:`legal_fallback`.

    Args:
        schedule: Name, or a builder of your own.
        pp_size: Number of ranks.
        num_microbatches: Number of microbatches of one step.
        stages_per_rank: Number of stages per rank, where the family leaves a choice.
        costs: Time of the actions of one stage.
    """
    if isinstance(schedule, str):
        schedule = legal_fallback(schedule, pp_size, num_microbatches, stages_per_rank)
    program = build_program(
        schedule, pp_size=pp_size, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank
    )
    return simulate(program, costs, check=False).bubble_rate


def choose_num_microbatches(
    schedule: str | PipelineProgramBuilder,
    *,
    pp_size: int,
    batch_size: int,
    stages_per_rank: int | None = None,
    costs: Costs = UNIT_COSTS,
    wanted_bubble: float = 0.1,
) -> int:
    """The automatic number of microbatches.

    Args:
        schedule: Name, or a builder of your own.
        pp_size: Number of ranks.
        batch_size: Number of samples of one batch.
        stages_per_rank: Number of stages per rank, where the family leaves a choice.
        costs: Time of the actions of one stage.
        wanted_bubble: Bubble rate to stay below.

    Returns:
        The smallest multiple of the number of ranks whose predicted bubble is below ``wanted_bubble``, but at most
        the number of samples and four times the number of ranks; the largest such multiple where none is.
    """
    if batch_size < 1:
        raise ScheduleError(f"a batch of {batch_size} samples cannot be split; it needs at least 1")
    candidates = [count * pp_size for count in range(1, _LONGEST + 1) if count * pp_size <= batch_size]
    for count in candidates:
        bubble = predict_bubble(
            schedule, pp_size=pp_size, num_microbatches=count, stages_per_rank=stages_per_rank, costs=costs
        )
        if bubble < wanted_bubble:
            return count
    return candidates[-1] if candidates else batch_size
