"""What a replay costs beside the units that it runs: skipped units, and glue on placeholders. Processor time.

    python benchmarks/pipeline/replay.py

The last of two stages owns one small unit, all others are skipped. The same step with its skipped units replaced by
a function that hands its argument on is the user's own glue, and is taken off. Lines through several numbers of units
give the cost of a replay and of each skipped unit; the goal is 30 microseconds and 2 more for each. One process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from d9d_lightning.stage.planner import Planner
from d9d_lightning.stage.replay import Replay
from d9d_lightning.stage.script import make_script
from d9d_lightning.values import Microbatch

WIDTH, ROUNDS, INNER = 4, 15, 40


class Chain(nn.Module):
    """Units in a row, with some additions between each two of them."""

    def __init__(self, units: int, additions: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(units))
        self.additions = additions

    def step(self, microbatch: Microbatch) -> Tensor:
        """The user's step."""
        hidden = microbatch.args[0]
        for unit in self.units:
            hidden = unit(hidden)
            for _ in range(self.additions):
                hidden = hidden + 1
        return hidden


def hand_on(x: Tensor) -> Tensor:
    """In the place of a unit: what a call costs by itself."""
    return x


def plain_step(last: nn.Module, units: int, additions: int, x: Tensor) -> Tensor:
    """The step with all units but the last replaced."""
    for _ in range(units - 1):
        x = hand_on(x)
        for _ in range(additions):
            x = x + 1
    x = last(x)
    for _ in range(additions):
        x = x + 1
    return x


def median_time(run: Callable[[], Any]) -> float:
    """Microseconds of processor time of one call."""
    times = []
    for _ in range(ROUNDS):
        start = time.process_time()
        for _ in range(INNER):
            run()
        times.append((time.process_time() - start) / INNER)
    return statistics.median(times) * 1e6


def measure(units: int, additions: int) -> tuple[float, float]:
    """A replay, and the plain step, in microseconds."""
    module = Chain(units, additions)
    x = torch.ones(2, WIDTH)
    microbatch = Microbatch(0, 2, (x,))
    planner = Planner(module, split_points=[f"units.{units - 1}"])
    planner.place(module.step, microbatch, (0, 1))
    plan = planner.plan(module.step, planner.describe("training_step", [microbatch])[0])
    replay = Replay(module, planner.interceptor, make_script(plan, 1), None)
    received = {value: torch.ones(2, WIDTH, requires_grad=True) for value in plan.boundaries[1].receives}
    with planner.interceptor.installed():
        replayed = median_time(lambda: replay.run(module.step, microbatch, dict(received)))
    return replayed, median_time(lambda: plain_step(module.units[-1], units, additions, x))


def main() -> None:
    """Print costs and the lines through them."""
    torch.set_num_threads(1)
    measure(4, 1)  # what is cached on first use
    for additions in (0, 1):
        print(f"{additions} additions after each unit: microseconds")
        print("skipped   replay    plain     more")
        points = []
        for units in (2, 9, 33, 65):
            replayed, plain = measure(units, additions)
            points.append((units - 1, replayed - plain))
            print(f"{units - 1:7d} {replayed:8.1f} {plain:8.1f} {replayed - plain:8.1f}")
        slope, start = statistics.linear_regression(*zip(*points, strict=True))
        print(f"a replay costs {start:.1f} more, and {slope:.2f} more for each skipped unit\n")


if __name__ == "__main__":
    main()
