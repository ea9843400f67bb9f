"""A program: the ordered actions of every rank, with its text and CSV forms."""

from __future__ import annotations

import csv
import functools
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from d9d_lightning.errors import ScheduleError
from d9d_lightning.schedule.actions import ActionBase, parse_action
from d9d_lightning.schedule.communication import add_communication_ops

__all__ = ["Program"]


@dataclass(frozen=True)
class Program:
    """What every rank does in one step.

    Attributes:
        pp_size: Number of ranks.
        num_microbatches: Number of microbatches of the step.
        stage_to_rank: Rank of every stage.
        actions: For every rank, its actions in order, communication included.
        name: Name of the schedule, where known; two programs with equal actions are equal whatever their names.
    """

    pp_size: int
    num_microbatches: int
    stage_to_rank: tuple[int, ...]
    actions: tuple[tuple[ActionBase, ...], ...]
    name: str = field(default="", compare=False)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.stage_to_rank)

    @functools.cached_property
    def compute_actions(self) -> tuple[tuple[ActionBase, ...], ...]:
        """The actions of every rank without communication."""
        return tuple(tuple(action for action in order if action.kind.is_compute) for order in self.actions)

    @functools.cached_property
    def stages_of_rank(self) -> tuple[tuple[int, ...], ...]:
        """Stages of every rank, ascending."""
        return tuple(
            tuple(stage for stage, host in enumerate(self.stage_to_rank) if host == rank)
            for rank in range(self.pp_size)
        )

    @classmethod
    def from_compute_actions(
        cls,
        compute_actions: Sequence[Iterable[ActionBase]],
        stage_to_rank: Sequence[int],
        num_microbatches: int,
        name: str = "",
    ) -> Program:
        """Add communication to compute actions and wrap them.

        Args:
            compute_actions: For every rank, its compute actions in order.
            stage_to_rank: Rank of every stage.
            num_microbatches: Number of microbatches of the step.
            name: Name of the schedule.

        Raises:
            ScheduleDeadlockError: The actions cannot be run in this order.
        """
        orders = {rank: list(order) for rank, order in enumerate(compute_actions)}
        actions = add_communication_ops(orders, dict(enumerate(stage_to_rank)), len(stage_to_rank))
        return cls.from_actions(actions, stage_to_rank, num_microbatches, name)

    @classmethod
    def from_actions(
        cls,
        actions: Mapping[int, Iterable[ActionBase]],
        stage_to_rank: Sequence[int],
        num_microbatches: int,
        name: str = "",
    ) -> Program:
        """Wrap what :meth:`PipelineProgramBuilder.compose` returns."""
        ordered = tuple(tuple(actions[rank]) for rank in range(len(actions)))
        return cls(len(ordered), num_microbatches, tuple(stage_to_rank), ordered, name)

    def serialize(self) -> Program:
        """The same program with every overlapped pair taken apart, for an executor that cannot overlap.

        The forward of a pair then sends its outputs before the backward runs, instead of after it.
        """
        orders = [[part for action in order for part in action.parts] for order in self.compute_actions]
        return self.from_compute_actions(orders, self.stage_to_rank, self.num_microbatches, self.name)

    def text(self) -> str:
        """Readable form; :meth:`parse` reads it back.

        The first line holds the sizes and the placement, each further line one rank.
        """
        placement = ",".join(map(str, self.stage_to_rank))
        name = f" name={self.name}" if self.name else ""
        lines = [f"ranks={self.pp_size} microbatches={self.num_microbatches} placement={placement}{name}"]
        lines += [f"{rank}: {' '.join(map(str, order))}" for rank, order in enumerate(self.actions)]
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Program:
        """Inverse of :meth:`text`.

        Raises:
            ScheduleError: The text is no program.
        """
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            head = dict(item.split("=", 1) for item in lines[0].split())
            pp_size, num_microbatches = int(head["ranks"]), int(head["microbatches"])
            placement = tuple(map(int, head["placement"].split(",")))
            orders = dict(line.split(":", 1) for line in lines[1:])
            rows = [orders[str(rank)] for rank in range(pp_size)]
        except (IndexError, KeyError, ValueError) as error:
            raise ScheduleError(
                f"this is no program: {text[:80]!r}; expected a first line 'ranks=2 microbatches=4 placement=0,1' "
                "and one line 'rank: action action ...' for each rank"
            ) from error
        actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
        return cls(pp_size, num_microbatches, placement, actions, head.get("name", ""))

    def to_csv(self, path: str | os.PathLike[str] | None = None) -> str:
        """The compute actions as CSV, one row per rank, as torch.distributed.pipelining reads it.

        Args:
            path: Also write it to this file.

        Returns:
            The CSV.
        """
        buffer = io.StringIO()
        csv.writer(buffer, lineterminator="\n").writerows([map(str, order) for order in self.compute_actions])
        if path is not None:
            Path(path).write_text(buffer.getvalue(), encoding="utf-8")
        return buffer.getvalue()

    @classmethod
    def from_csv(cls, source: str | os.PathLike[str], name: str = "") -> Program:
        """Read a compute-only CSV of torch.distributed.pipelining, one row per rank; communication is added.

        Args:
            source: The CSV itself, or the path of a file.
            name: Name of the schedule.

        Raises:
            ScheduleError: A cell is no action, a stage appears on two ranks, or a stage is missing.
        """
        text = source if isinstance(source, str) and _is_csv(source) else Path(source).read_text(encoding="utf-8")
        orders = [_parse_row(row) for row in csv.reader(io.StringIO(text)) if row]
        stage_to_rank: dict[int, int] = {}
        microbatches = 0
        for rank, order in enumerate(orders):
            for part in (part for action in order for part in action.parts):
                microbatches = max(microbatches, part.microbatch + 1)
                if stage_to_rank.setdefault(part.stage, rank) != rank:
                    raise ScheduleError(
                        f"{part} is on rank {rank}, but stage {part.stage} began on rank {stage_to_rank[part.stage]}"
                    )
        missing = sorted(set(range(max(stage_to_rank, default=0) + 1)) - set(stage_to_rank))
        if missing:
            raise ScheduleError(f"the CSV has no action of stage {missing[0]}; every stage needs its actions")
        return cls.from_compute_actions(orders, [stage_to_rank[s] for s in sorted(stage_to_rank)], microbatches, name)


def _is_csv(source: str) -> bool:
    """Whether a string is CSV content, rather than the path of a file."""
    if "\n" in source:
        return True
    try:
        return all(cell.strip() == "" or parse_action(cell.strip()) for cell in source.split(","))
    except ScheduleError:
        return False


def _parse_row(row: Sequence[str]) -> list[ActionBase]:
    actions = [parse_action(cell.strip()) for cell in row if cell.strip() not in ("", "None")]
    for action in actions:
        if not action.kind.is_compute:
            raise ScheduleError(f"the CSV holds {action}; expected compute actions only, communication is added here")
    return actions
