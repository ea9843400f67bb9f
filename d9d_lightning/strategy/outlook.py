"""What is known of a run before any process starts, as types and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from d9d_lightning.errors import PipelineConfigurationError
from d9d_lightning.schedule import Program, Simulation
from d9d_lightning.schedule.raster import draw_png
from d9d_lightning.schedule.render import draw_html, draw_svg

__all__ = ["Outlook", "ScheduleOutlook", "StageOutlook", "write_picture"]

SHOWN_UNITS = 8


def show_bytes(size: float) -> str:
    """A size in the unit that suits it.

    >>> show_bytes(1536)
    '1.5 KB'
    """
    for unit in ("B", "KB", "MB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GB"


@dataclass(frozen=True)
class StageOutlook:
    """One stage as it would be. Sizes are in bytes; operations, activations and sent values are per microbatch.

    Attributes:
        stage: Number of the stage.
        rank: Its pipeline rank.
        units: Its units, in call order.
        parameters: Number of parameters (elements).
        parameter_bytes: Their size.
        flops: Operations of a forward.
        activation_bytes: What a forward keeps for the backward.
        sent_bytes: What goes to the next stage.
    """

    stage: int
    rank: int
    units: tuple[str, ...]
    parameters: int
    parameter_bytes: int
    flops: int
    activation_bytes: int
    sent_bytes: int

    def text(self) -> str:
        """One line."""
        units = ", ".join(self.units) or "(relays)"
        if len(self.units) > SHOWN_UNITS:
            units = f"{self.units[0]}, {self.units[1]}, ..., {self.units[-1]} ({len(self.units)} units)"
        return (
            f"stage {self.stage} on rank {self.rank}: {units}; {self.parameters:,} parameters "
            f"({show_bytes(self.parameter_bytes)}); per microbatch {self.flops / 1e6:.4g} MFLOP, "
            f"{show_bytes(self.activation_bytes)} kept for the backward, {show_bytes(self.sent_bytes)} sent on"
        )


@dataclass(frozen=True)
class ScheduleOutlook:
    """One schedule as it would run.

    Attributes:
        name: Name of the schedule.
        num_stages: Number of stages.
        program: What every rank does; None where it cannot be run.
        simulation: The program, clocked by the operations of its stages.
        rank_bytes: For each rank, parameters, gradients and the most activations at once.
        sent_bytes: What crosses all boundaries between ranks for one microbatch, forward.
        problem: Why it cannot be run; empty where it can.
    """

    name: str
    num_stages: int
    program: Program | None = None
    simulation: Simulation | None = None
    rank_bytes: tuple[int, ...] = ()
    sent_bytes: int = 0
    problem: str = ""

    def text(self) -> str:
        """One line of the table."""
        if self.simulation is None or self.program is None:
            return f"{self.name:17s} {self.num_stages:6d}  -- {self.problem}"
        memory = ", ".join(map(show_bytes, self.rank_bytes))
        return (
            f"{self.name:17s} {self.num_stages:6d} {self.program.num_microbatches:13d} "
            f"{self.simulation.bubble_rate:7.1%} {show_bytes(self.sent_bytes):>9s}  {memory}"
        )


TABLE_HEAD = (
    f"{'schedule':17s} {'stages':>6s} {'microbatches':>13s} {'bubble':>7s} {'sent':>9s}  "
    "memory of each rank (parameters, gradients, activations)"
)


@dataclass(frozen=True)
class Outlook:
    """A module under one schedule, and under others beside it.

    Attributes:
        stages: Stages under the chosen schedule.
        shared: Parameters that several stages use, with these stages.
        schedules: The chosen schedule first.
        microbatch: Samples of a microbatch.
        bubble: Predicted bubble of the chosen schedule if all stages took equally long.
        notes: What a user should be told about how the step is traced.
    """

    stages: tuple[StageOutlook, ...]
    shared: tuple[tuple[str, tuple[int, ...]], ...]
    schedules: tuple[ScheduleOutlook, ...]
    microbatch: int
    num_microbatches: int
    bubble: float
    notes: Sequence[str]

    @property
    def simulation(self) -> Simulation:
        """The chosen schedule on the clock."""
        found = self.schedules[0].simulation
        if found is None:
            raise PipelineConfigurationError(f"{self.schedules[0].name} cannot be run: {self.schedules[0].problem}")
        return found

    def text(self) -> str:
        """Stages, shared parameters, the bubble, and the table of schedules."""
        lines = [stage.text() for stage in self.stages]
        lines += [f"shared: {name} on stages {', '.join(map(str, stages))}" for name, stages in self.shared]
        lines += [
            f"{self.num_microbatches} microbatches of {self.microbatch}, predicted bubble {self.bubble:.0%} with equal "
            f"stages, {self.simulation.bubble_rate:.0%} with these",
            "",
            TABLE_HEAD,
            *(schedule.text() for schedule in self.schedules),
            "The state of the optimizer comes on top (Adam and AdamW: twice the parameters).",
            *self.notes,
        ]
        return "\n".join(lines)


def write_picture(simulation: Simulation, path: str | Path) -> None:
    """Write the timeline of a schedule.

    Args:
        simulation: The program on the clock.
        path: Ends with ``.png``, ``.svg`` or ``.html``.

    Raises:
        PipelineConfigurationError: Another ending.
    """
    path = Path(path)
    if path.suffix == ".png":
        content = draw_png(draw_svg(simulation))
    elif path.suffix in (".svg", ".html"):
        draw = draw_svg if path.suffix == ".svg" else draw_html
        content = draw(simulation).encode()
    else:
        raise PipelineConfigurationError(
            f"a picture cannot be written to {str(path)!r}; expected a name that ends with .png, .svg or .html, such "
            f"as {path.stem}.png"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
