"""Check a schedule of your own the way the built-in ones are checked."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from d9d_lightning.errors import ScheduleDeadlockError, ScheduleError
from d9d_lightning.schedule import ActionBase, PipelineProgramBuilder, Program, check_program
from d9d_lightning.schedule.topology import build_stage_to_host_rank_topology

__all__ = ["ScheduleReport", "check_schedule"]


@dataclass(frozen=True)
class ScheduleReport:
    """What :func:`check_schedule` ran.

    Attributes:
        passed: ``(pp_size, num_microbatches)`` of every program that was built and is right.
        refused: Those that the builder refused, with its message.
    """

    passed: tuple[tuple[int, int], ...]
    refused: tuple[tuple[int, int, str], ...]


def check_schedule(
    builder: PipelineProgramBuilder,
    *,
    pp_sizes: Iterable[int] = (1, 2, 3, 4, 8),
    microbatches: Iterable[int] = (1, 2, 3, 4, 5, 8, 9, 16),
) -> ScheduleReport:
    """Build programs of many sizes and check each one.

    Every stage runs every microbatch once and in a legal order, on the rank that ``topology_style`` says; no deadlock,
    even if every transfer blocks both of its ranks; the same call gives the same program again (every rank builds its
    own); and the program survives its text form. A builder may refuse sizes with a ``ValueError`` that names both
    numbers.

    Args:
        builder: The schedule.
        pp_sizes: Numbers of ranks to try.
        microbatches: Numbers of microbatches to try.

    Returns:
        What passed and what the builder refused.

    Raises:
        ScheduleError: Names the sizes, and the action that is missing, doubled, misplaced or blocked.
    """
    passed: list[tuple[int, int]] = []
    refused: list[tuple[int, int, str]] = []
    for pp_size, num_microbatches in itertools.product(pp_sizes, microbatches):
        refusal = _try_one(builder, pp_size, num_microbatches)
        if refusal is None:
            passed.append((pp_size, num_microbatches))
        else:
            refused.append((pp_size, num_microbatches, refusal))
    if not passed:
        raise ScheduleError(f"{type(builder).__name__} refused all sizes; the last message was {refused[-1][2]!r}")
    return ScheduleReport(tuple(passed), tuple(refused))


def _try_one(builder: PipelineProgramBuilder, pp_size: int, num_microbatches: int) -> str | None:
    """Build and check one program; returns the message if the builder refuses the sizes."""
    where = f"{type(builder).__name__} with pp_size={pp_size}, num_microbatches={num_microbatches}"
    try:
        actions = builder.compose(num_microbatches=num_microbatches, pp_size=pp_size)
    except ScheduleDeadlockError as error:
        raise ScheduleDeadlockError(f"{where}: {error}") from error
    except ValueError as error:
        return _check_refusal(error, pp_size, num_microbatches)
    try:
        _check_one(builder, actions, pp_size, num_microbatches)
    except ScheduleError as error:
        raise type(error)(f"{where}: {error}") from error
    return None


def _check_refusal(error: ValueError, pp_size: int, num_microbatches: int) -> str:
    message = str(error)
    if str(pp_size) not in message or str(num_microbatches) not in message:
        raise ScheduleError(
            f"a refusal must name both numbers, pp_size={pp_size} and num_microbatches={num_microbatches}, got "
            f"{message!r}"
        ) from error
    return message


def _check_one(
    builder: PipelineProgramBuilder, actions: dict[int, list[ActionBase]], pp_size: int, num_microbatches: int
) -> None:
    if sorted(actions) != list(range(pp_size)):
        raise ScheduleError(f"compose returned the ranks {sorted(actions)}, expected 0 to {pp_size - 1}")
    stranger = next((entry for order in actions.values() for entry in order if not isinstance(entry, ActionBase)), None)
    if stranger is not None:
        raise ScheduleError(f"compose returned {stranger!r}; actions are subclasses of ActionBase")
    num_stages = builder.num_stages_per_rank * pp_size
    placement = build_stage_to_host_rank_topology(pp_size, num_stages, builder.topology_style)
    program = Program.from_actions(actions, tuple(placement.values()), num_microbatches)
    check_program(program)
    again = builder.compose(num_microbatches=num_microbatches, pp_size=pp_size)
    if Program.from_actions(again, tuple(placement.values()), num_microbatches) != program:
        raise ScheduleError("two calls of compose gave different programs; ranks would disagree")
    if Program.parse(program.text()) != program:
        raise ScheduleError("the program does not survive its text form; actions must print as the built-in ones do")
