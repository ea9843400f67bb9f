"""Which rank hosts which stage."""

from __future__ import annotations

import enum

from d9d_lightning.errors import ScheduleError

__all__ = ["ScheduleStyle", "build_host_rank_to_stage_topology", "build_stage_to_host_rank_topology"]


class ScheduleStyle(enum.Enum):
    """How stages are laid over ranks."""

    loop = "loop"
    """Stage ``s`` on rank ``s % pp_size``: 0 1 2 3 0 1 2 3."""
    v = "v"
    """Every run of ``pp_size`` stages turns round, so neighbours at the turn share a rank: 0 1 2 3 3 2 1 0."""


def build_stage_to_host_rank_topology(pp_size: int, num_stages: int, style: ScheduleStyle) -> dict[int, int]:
    """Rank of every stage.

    Args:
        pp_size: Number of ranks.
        num_stages: Number of stages; a multiple of ``pp_size`` for the V style.
        style: The placement.

    Returns:
        Stage to rank, in order of stages.

    Raises:
        ScheduleError: A V of a number of stages that is not a multiple of the number of ranks, or a size below 1.
    """
    if pp_size < 1 or num_stages < 1:
        raise ScheduleError(f"a placement needs at least 1 rank and 1 stage, got {pp_size} ranks, {num_stages} stages")
    if style is ScheduleStyle.loop:
        return {stage: stage % pp_size for stage in range(num_stages)}
    if num_stages % pp_size:
        raise ScheduleError(
            f"a V placement needs a multiple of the number of ranks, got {num_stages} stages on {pp_size} ranks; "
            f"use {pp_size * max(1, round(num_stages / pp_size))} stages"
        )
    ranks = range(pp_size)
    return {
        stage: ranks[stage % pp_size] if (stage // pp_size) % 2 == 0 else ranks[pp_size - 1 - stage % pp_size]
        for stage in range(num_stages)
    }


def build_host_rank_to_stage_topology(stage_to_rank: dict[int, int]) -> dict[int, list[int]]:
    """Stages of every rank, ascending: the inverse of :func:`build_stage_to_host_rank_topology`."""
    hosted: dict[int, list[int]] = {rank: [] for rank in sorted(set(stage_to_rank.values()))}
    for stage in sorted(stage_to_rank):
        hosted[stage_to_rank[stage]].append(stage)
    return hosted
