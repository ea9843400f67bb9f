"""Each fault under each schedule, then random ones: how long until the last rank has gone, and what was shown first.

Run ``python -m benchmarks.faults.run --write`` from the root of the repository; see README.md beside this file.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults.fault import Fault
from benchmarks.faults.job import run_in
from benchmarks.faults.ranks import Ending, run_ranks
from d9d_lightning.schedule import SCHEDULES

PAGE = Path(__file__).parents[2] / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
NAMES = tuple(name for name in SCHEDULES if name != "forward_only")
HANG_LIMIT_S = 5.0
GOAL_S = 10.0


@dataclass(frozen=True)
class Case:
    """A fault outside of training batches.

    Attributes:
        fault: The fault.
        options: Further arguments of ``job.run_loop``; ``save``: whether checkpoints are written.
        method: What is asked of the trainer.
    """

    fault: Fault
    options: Mapping[str, Any] = field(default_factory=dict)
    method: str = "fit"

    @property
    def name(self) -> str:
        """Short text for tables."""
        return self.fault.name + (", in lockstep" if self.options.get("reads") else "")


FAULTS = (
    Fault("raise", "loss"),
    Fault("raise", "forward", block=1),
    Fault("raise", "backward", block=1),
    Fault("raise", "hook", 0),
    Fault("raise", "hook", 1),
    Fault("raise", "loader", 1),
    Fault("raise", "callback", 0),
    Fault("kill", "forward", block=1),
    Fault("kill", "callback", 0),
    Fault("exit", "callback", 1),
    Fault("stop", "hook", 0),
    Fault("stop", "hook", 1),
    Fault("interrupt", "step", 1),
    Fault("terminate", "step", 1),
    Fault("hang", "forward", block=1),
)
ELSEWHERE = (
    Case(Fault("raise", "setup", 1, None)),
    Case(Fault("raise", "configure_optimizers", 0, None)),
    Case(Fault("raise", "on_fit_start", 1, None)),
    Case(Fault("raise", "step", 1, 0, loop="validation"), {"evaluate": True, "trainer": {"num_sanity_val_steps": 1}}),
    Case(Fault("raise", "logger", 0, None), {"log": True}),
    Case(Fault("raise", "on_save_checkpoint", 1, None), {"save": True}),
    Case(Fault("kill", "on_save_checkpoint", 1, None), {"save": True}),
    Case(Fault("kill", "file", 0, None), {"save": True}),
    Case(Fault("raise", "on_train_end", 1, None)),
    Case(Fault("stop", "on_train_end", 1, None)),
    Case(Fault("raise", "forward", None, 1, 1, "validation"), {"evaluate": True}),
    Case(Fault("raise", "forward", None, 1, 1, "test"), {}, "test"),
    Case(Fault("raise", "loss", 0, 1, loop="predict"), {}, "predict"),
    Case(Fault("raise", "loader", 1, None, loop="validation"), {}, "validate"),
    Case(Fault("kill", "forward", None, 1, 5, "test"), {}, "test"),
    Case(Fault("raise", "forward", None, 1, 1, "validation"), {"reads": True}, "validate"),
    Case(Fault("raise", "step", 1, 1, loop="test"), {"reads": True}, "test"),
    Case(Fault("kill", "forward", None, 1, 5, "validation"), {"reads": True}, "validate"),
    Case(Fault("stop", "hook", 0, 1, loop="predict"), {"reads": True}, "predict"),
)


@dataclass(frozen=True)
class Result:
    """What one fault came to."""

    fault: Fault
    schedule: str
    endings: Sequence[Ending]
    name: str

    @property
    def struck(self) -> bool:
        """Whether the chosen place was reached at all."""
        return any(ending.exit_code != 0 for ending in self.endings)

    @property
    def hung(self) -> bool:
        """Whether a rank had to be killed from outside."""
        return any(ending.exit_code is None for ending in self.endings)

    @property
    def seconds(self) -> float:
        """From the fault until the last rank has exited."""
        return max(ending.seconds for ending in self.endings)

    @property
    def true_first(self) -> bool:
        """Whether the first error that each rank shows is the true one, and some rank shows it."""
        shown = [ending.first_error for ending in self.endings if ending.first_error]
        told = self.fault.told
        return not shown if not told else bool(shown) and all(told in line for line in shown)

    @property
    def left_behind(self) -> int:
        """Processes that were still there afterwards."""
        return sum(ending.left_behind for ending in self.endings)

    @property
    def fine(self) -> bool:
        """Whether everything that is promised was kept."""
        limit = GOAL_S if self.fault.kind not in ("hang", "stop") else HANG_LIMIT_S + GOAL_S
        return not self.hung and self.true_first and self.seconds < limit and not self.left_behind

    @property
    def codes(self) -> str:
        """Exit codes, that of rank 0 first."""
        return ", ".join("hung" if ending.exit_code is None else str(ending.exit_code) for ending in self.endings)

    @property
    def verdict(self) -> str:
        """Whether the true error was shown first, in a word."""
        if not self.struck:
            return "(did not strike)"
        return ("yes" if self.true_first else "NO") if self.fault.told else "none is shown"

    def line(self) -> str:
        """Everything in a line."""
        return f"{self.name} | {self.schedule} | {self.seconds:.1f} s | {self.codes} | {self.verdict}"


def inject(asked: tuple[Case, str], ranks: int = 2) -> Result:
    """Run one job with one fault under one schedule."""
    case, schedule = asked
    timeout = HANG_LIMIT_S if case.fault.kind == "hang" else 60.0
    with tempfile.TemporaryDirectory(prefix="d9d-saved-") as folder:
        options = {**case.options, "schedule": schedule, "ranks": ranks, "timeout": timeout}
        endings = run_ranks(run_in, ranks, folder, case.method, case.fault, options, limit_s=90.0)
    return Result(case.fault, schedule, endings, case.name)


def show(result: Result) -> None:
    """Say what came of a fault, and everything about it where it went wrong."""
    print(result.line(), flush=True)
    if result.struck and not result.fine:
        for rank, ending in enumerate(result.endings):
            print(f"---- rank {rank}:\n{ending.text}", file=sys.stderr, flush=True)


def summarize(results: Sequence[Result]) -> list[str]:
    """Sentences about the random faults."""
    struck = [result for result in results if result.struck]
    kinds = Counter(result.fault.kind for result in struck)
    waits = ("stop", "hang")
    quick = [result.seconds for result in struck if result.fault.kind not in waits]
    slow = [result.seconds for result in struck if result.fault.kind in waits]
    return [
        f"{len(results)} random faults (place, kind, rank, batch and schedule drawn; seed in the script's arguments): "
        f"{len(struck)} struck ({', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}), the others "
        "had drawn a place that their rank never reaches, and trained to the end.",
        f"Hangs: {sum(result.hung for result in struck)}. "
        f"True error first: {sum(result.true_first for result in struck)} of {len(struck)}. "
        f"Processes left behind: {sum(result.left_behind for result in results)}.",
        f"Longest time until the last rank had gone: {max(quick, default=0.0):.1f} s; with a stopped or hanging rank "
        f"{max(slow, default=0.0):.1f} s (limits of 5 s included).",
    ]


def tabulate(table: Sequence[Result]) -> list[str]:
    """A row for each fault: seconds under each schedule, then how the ranks ended and what was shown."""
    schedules = list(dict.fromkeys(result.schedule for result in table))
    columns = ["fault", *schedules, "exit codes, rank 0 first", "true error first"]
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for name in dict.fromkeys(result.name for result in table):
        row = {result.schedule: result for result in table if result.name == name}
        seconds = [f"{row[schedule].seconds:.1f}" for schedule in schedules]
        lines.append("| " + " | ".join([name, *seconds, *_count(row.values())]) + " |")
    return lines


def _count(row: Iterable[Result]) -> list[str]:
    """What all schedules have in common; where they differ, how many show what."""
    cells = []
    for counted in (Counter(result.codes for result in row), Counter(result.verdict for result in row)):
        several = len(counted) > 1
        cells.append("; ".join(f"{what} ({count} x)" if several else what for what, count in counted.most_common()))
    return cells


def write_page(table: Sequence[Result], random_faults: Sequence[Result]) -> None:
    """Put the results into the documentation, between the markers."""
    lines = [
        *tabulate(table),
        "",
        *[line for sentence in summarize(random_faults) for line in (sentence, "")],
    ]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines).rstrip() + f"\n{END}{after}")


def main() -> int:
    """Run what the arguments ask for; 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random", type=int, default=100, help="number of random faults")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random faults")
    parser.add_argument("--schedules", nargs="+", choices=NAMES, default=NAMES, help="columns of the table")
    parser.add_argument("--jobs", type=int, default=1, help="faults at the same time; two processes each")
    parser.add_argument("--no-table", action="store_true", help="random faults only")
    parser.add_argument("--write", action="store_true", help=f"write the results into {PAGE.name}")
    chosen = parser.parse_args()
    cases = [] if chosen.no_table else [*map(Case, FAULTS), *ELSEWHERE]
    generator = random.Random(chosen.seed)
    results: list[Result] = []
    drawn: list[Result] = []
    random_cases = [
        (Case(Fault.draw(generator, ranks=2, batches=5)), generator.choice(NAMES)) for _ in range(chosen.random)
    ]
    # processes, since each needs a server of its own that starts its ranks
    with ProcessPoolExecutor(chosen.jobs, multiprocessing.get_context("spawn")) as pool:
        for kept, asked in ((results, list(itertools.product(cases, chosen.schedules))), (drawn, random_cases)):
            for result in pool.map(inject, asked):
                kept.append(result)
                show(result)
    print("\n".join(summarize(drawn)))
    if chosen.write:
        write_page(results, drawn)
    return int(not all(result.fine for result in [*results, *drawn] if result.struck))


if __name__ == "__main__":
    sys.exit(main())
