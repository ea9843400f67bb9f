"""``python -m d9d_lightning.schedule zbv --ranks 4 --microbatches 8``: draw a schedule, or compare all of them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from d9d_lightning.errors import ScheduleError
from d9d_lightning.schedule.compare import compare_schedules
from d9d_lightning.schedule.costs import Costs
from d9d_lightning.schedule.registry import SCHEDULES, build_program
from d9d_lightning.schedule.render import draw_compact, draw_html, draw_svg, draw_text, summarize
from d9d_lightning.schedule.simulate import simulate
from d9d_lightning.schedule.topology import ScheduleStyle

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Command line; that of the process by default.

    Returns:
        Exit status: 0, or 2 where the schedule does not take the numbers.
    """
    options = _parser().parse_args(arguments)
    try:
        sys.stdout.write(_compare(options) if options.compare else _draw(options))
    except ScheduleError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m d9d_lightning.schedule",
        description="Draw the timeline of a pipeline schedule with its bubble and memory, or compare all schedules.",
    )
    parser.add_argument("name", nargs="?", default=None, help=f"one of {', '.join(SCHEDULES)}")
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks (4)")
    parser.add_argument("--microbatches", type=int, default=8, help="number of microbatches (8)")
    parser.add_argument("--stages-per-rank", type=int, default=None, help="for looped schedules, forward_only, auto")
    parser.add_argument(
        "--style", choices=[style.name for style in ScheduleStyle], default=None, help="placement, for forward_only"
    )
    parser.add_argument(
        "--costs",
        type=_parse_costs,
        default=Costs(),
        metavar="F,I,W,C",
        help="time of forward, input gradient, weight gradient of one stage (of a whole rank with --compare), and "
        "latency of one hop (1,1,1,0)",
    )
    parser.add_argument(
        "--max-activations",
        type=float,
        default=None,
        help="memory limit of a rank, in stage activations (in activations of a whole rank with --compare)",
    )
    parser.add_argument(
        "--barrier", action=argparse.BooleanOptionalAction, default=True, help="all ranks meet at the optimizer step"
    )
    parser.add_argument("--compare", action="store_true", help="table of all schedules and which to take")
    parser.add_argument("--svg", type=Path, default=None, metavar="FILE", help="also write a picture")
    parser.add_argument("--html", type=Path, default=None, metavar="FILE", help="also write a page")
    parser.add_argument("--compact", action="store_true", help="one character per tick")
    parser.add_argument("--width", type=int, default=None, help="columns of the text timeline at most")
    return parser


def _parse_costs(text: str) -> Costs:
    numbers = text.split(",")
    if len(numbers) not in (3, 4):
        raise argparse.ArgumentTypeError(f"{text!r}: expected F,I,W or F,I,W,C, for example 1,1,0.8,0.1")
    try:
        return Costs(*map(float, numbers))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error


def _draw(options: argparse.Namespace) -> str:
    if options.name is None:
        raise ScheduleError(f"give a schedule ({', '.join(SCHEDULES)}), or --compare")
    program = build_program(
        options.name,
        pp_size=options.ranks,
        num_microbatches=options.microbatches,
        stages_per_rank=options.stages_per_rank,
        style=None if options.style is None else ScheduleStyle[options.style],
        costs=options.costs,
        max_activations=options.max_activations,
        barrier=options.barrier,
    )
    run = simulate(program, options.costs)
    for path, draw in ((options.svg, draw_svg), (options.html, draw_html)):
        if path is not None:
            path.write_text(draw(run), encoding="utf-8")
    heading = f"{options.name}: {program.pp_size} ranks, {program.num_microbatches} microbatches\n"
    timeline = draw_compact(run) if options.compact else draw_text(run, options.width)
    return heading + timeline + summarize(run)


def _compare(options: argparse.Namespace) -> str:
    return compare_schedules(
        pp_size=options.ranks,
        num_microbatches=options.microbatches,
        costs=options.costs,
        max_activations=options.max_activations,
        barrier=options.barrier,
    ).text()


if __name__ == "__main__":
    sys.exit(main())
