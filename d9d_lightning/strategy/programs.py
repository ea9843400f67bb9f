"""Which program a batch runs: the schedule's own, or a legal one of the same placement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from d9d_lightning.errors import PipelineConfigurationError, ScheduleError
from d9d_lightning.schedule import (
    SCHEDULES,
    PipelineProgramBuilder,
    Program,
    build_program,
    build_stage_to_host_rank_topology,
    make_builder,
)

__all__ = ["Programs", "schedule_names"]

LARGEST_BUBBLE = 0.10
LARGEST_FACTOR = 4
SUBSTITUTES = {"dualpipev": "zbv", "zb_h2": "zb_h1", "interleaved_1f1b": "looped_bfs", "zb1p": "looped_bfs"}
"""What stands in where a family cannot take a number of microbatches; the placement stays what it is."""


def schedule_names() -> tuple[str, ...]:
    """Names that ``D9DStrategy(schedule=...)`` takes."""
    return tuple(name for name in SCHEDULES if name != "forward_only")


class Programs:
    """Programs of one schedule on one pipeline, built once per number of microbatches.

    Args:
        schedule: Name of a schedule, or a builder.
        size: Number of pipeline ranks.
    """

    def __init__(self, schedule: str | PipelineProgramBuilder, size: int) -> None:
        self.schedule = schedule
        self.size = size
        self._builder = make_builder(schedule) if isinstance(schedule, str) else schedule
        self.num_stages = self._builder.num_stages_per_rank * size
        self.stage_to_rank = self._place()
        self._training: dict[int, Program] = {}
        self._evaluation: dict[int, Program] = {}
        self._said: set[str] = set()

    def _place(self) -> tuple[int, ...]:
        try:
            placed = build_stage_to_host_rank_topology(self.size, self.num_stages, self._builder.topology_style)
        except ScheduleError as error:
            raise PipelineConfigurationError(
                f"D9DStrategy(schedule={self.schedule!r}) cannot place {self.num_stages} stages on {self.size} "
                f"pipeline ranks: {error}"
            ) from error
        return tuple(placed[stage] for stage in range(self.num_stages))

    @property
    def loss_owner(self) -> int:
        """Pipeline rank of the last stage."""
        return self.stage_to_rank[-1]

    def training(self, num_microbatches: int) -> Program:
        """Program of one training batch."""
        if num_microbatches not in self._training:
            self._training[num_microbatches] = self._build(num_microbatches)
        return self._training[num_microbatches]

    def evaluation(self, num_microbatches: int) -> Program:
        """Forward-only program on the same placement."""
        if num_microbatches not in self._evaluation:
            self._evaluation[num_microbatches] = build_program(
                "forward_only",
                pp_size=self.size,
                num_microbatches=num_microbatches,
                stages_per_rank=self._builder.num_stages_per_rank,
                style=self._builder.topology_style,
            )
        return self._evaluation[num_microbatches]

    def _build(self, num_microbatches: int) -> Program:
        try:
            return build_program(self.schedule, pp_size=self.size, num_microbatches=num_microbatches)
        except ScheduleError as error:
            substitute = SUBSTITUTES.get(self.schedule) if isinstance(self.schedule, str) else None
            if substitute is None or substitute not in SCHEDULES:
                raise
            self._say(
                f"schedule {self.schedule!r} cannot run {num_microbatches} microbatches on {self.size} ranks "
                f"({error}); such batches run {substitute!r}, which has the same placement."
            )
        style: dict[str, Any] = {}
        if substitute == "looped_bfs":
            style["stages_per_rank"] = self._builder.num_stages_per_rank
        return build_program(substitute, pp_size=self.size, num_microbatches=num_microbatches, **style)

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            rank_zero_warn(text)

    def choose_num_microbatches(self, batch_size: int) -> int:
        """Number of microbatches for ``num_microbatches="auto"``.

        The smallest multiple of the pipeline size whose predicted bubble is below 10 %, at most the batch size and four
        times the pipeline size.
        """
        if self.size == 1:
            return 1
        limit = max(1, min(batch_size, LARGEST_FACTOR * self.size))
        candidates: Sequence[int] = range(self.size, limit + 1, self.size)
        chosen = limit
        for candidate in candidates:
            chosen = candidate
            if self.predicted_bubble(candidate) <= LARGEST_BUBBLE:
                break
        rank_zero_info(
            f'num_microbatches="auto": {chosen} microbatches for a batch of {batch_size}, predicted bubble '
            f"{self.predicted_bubble(chosen):.0%}. Type num_microbatches={chosen} to fix it."
        )
        return chosen

    def predicted_bubble(self, num_microbatches: int) -> float:
        """Share of time in which ranks wait, if a backward takes twice as long as a forward."""
        from d9d_lightning.schedule.engine import run_in_order

        program = self.training(num_microbatches)
        cost = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}
        times = run_in_order(
            program.compute_actions,
            dict(enumerate(program.stage_to_rank)),
            lambda action: sum(cost[part.kind.name] for part in action.parts),
        )
        end = max(interval[1] for row in times for interval in row)
        busy = sum(interval[1] - interval[0] for row in times for interval in row)
        return 1.0 - busy / (end * len(times))
