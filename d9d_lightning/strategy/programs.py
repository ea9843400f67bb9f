"""Which program a batch runs: the schedule's own, or a legal one of the same placement."""

from __future__ import annotations

from collections.abc import Callable

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from d9d_lightning.errors import PipelineConfigurationError, ScheduleError
from d9d_lightning.schedule import (
    SCHEDULES,
    Costs,
    PipelineProgramBuilder,
    Program,
    build_program,
    build_stage_to_host_rank_topology,
    choose_num_microbatches,
    legal_fallback,
    make_builder,
    predict_bubble,
    simulate,
)
from d9d_lightning.schedule.families.auto import AutomaticProgramBuilder

__all__ = ["Programs", "schedule_names"]

SMALLEST_GAIN = 0.01


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
        self._measured: PipelineProgramBuilder | None = None
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

    @property
    def is_adaptable(self) -> bool:
        """Whether the order may follow measured costs: ``auto``, unless it was given costs of its own."""
        builder = self._builder
        return self.size > 1 and isinstance(builder, AutomaticProgramBuilder) and not builder.is_measured

    def adapt(self, costs: Costs, num_microbatches: int) -> str:
        """Take an order made for the costs, if it is predicted to save at least a hundredth of the step.

        Args:
            costs: Measured, equal on all ranks.
            num_microbatches: The number to compare for.

        Returns:
            What was decided, for the user.
        """
        builder = self._builder
        if not isinstance(builder, AutomaticProgramBuilder):
            return "only schedule='auto' follows measured costs"
        found = builder.with_costs(costs)
        program = build_program(found, pp_size=self.size, num_microbatches=num_microbatches)
        before = simulate(self.training(num_microbatches), costs, check=False).span
        after = simulate(program, costs, check=False).span
        times = f"{before * 1e3:.1f} ms before, {after * 1e3:.1f} ms after, by the costs that were measured"
        if after > (1 - SMALLEST_GAIN) * before:
            return f"schedule='auto' keeps its order ({times})"
        self._measured = found
        self._training = {num_microbatches: program}
        return f"schedule='auto' takes a new order ({times})"

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
        if self._measured is not None:
            return build_program(self._measured, pp_size=self.size, num_microbatches=num_microbatches)
        if not isinstance(self.schedule, str):
            return build_program(self.schedule, pp_size=self.size, num_microbatches=num_microbatches)
        stages = self._builder.num_stages_per_rank
        name = legal_fallback(self.schedule, self.size, num_microbatches, stages)
        if name != self.schedule:
            self._say(
                f"schedule {self.schedule!r} cannot run {num_microbatches} microbatches on {self.size} ranks; such "
                f"batches run {name!r}, which has the same placement.",
                rank_zero_warn,
            )
        return build_program(name, pp_size=self.size, num_microbatches=num_microbatches, stages_per_rank=stages)

    def _say(self, text: str, tell: Callable[[str], None]) -> None:
        if text not in self._said:
            self._said.add(text)
            tell(text)

    def choose_num_microbatches(self, batch_size: int) -> int:
        """Number of microbatches for ``num_microbatches="auto"``, and says so."""
        chosen = choose_num_microbatches(self.schedule, pp_size=self.size, batch_size=batch_size)
        if self.size > 1:
            self._say(
                f'num_microbatches="auto": {chosen} microbatches for a batch of {batch_size}, predicted bubble '
                f"{self.predicted_bubble(chosen):.0%}. Type num_microbatches={chosen} to fix it.",
                rank_zero_info,
            )
        return chosen

    def predicted_bubble(self, num_microbatches: int) -> float:
        """Share of time in which ranks wait, if F, I and W take equally long."""
        return predict_bubble(self.schedule, pp_size=self.size, num_microbatches=num_microbatches)
