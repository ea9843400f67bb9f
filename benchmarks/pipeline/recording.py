"""What it costs to note the time of every action, in processor time, against a step of the big model.

    python benchmarks/pipeline/recording.py

The executor's calls of its monitor and its transport are made with and without the recorder in between; nothing is
computed or sent, so that the difference is the recorder alone. One process, a few seconds.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from workload import NUM_MICROBATCHES, StagedModel, Workload, loss_of

from d9d_lightning.runtime.recorder import StepRecorder
from d9d_lightning.schedule import Program, build_program


class Silent:
    """A transport and a monitor that do nothing."""

    problem = None

    def enter(self, action: object) -> None:
        """Begin."""

    def leave(self) -> None:
        """End."""

    def __getattr__(self, name: str) -> Any:
        return self._do_nothing

    def _do_nothing(self, *arguments: object) -> None:
        """Send or take."""


def run(program: Program, transport: Any, monitor: Any) -> None:
    """Rank 0's calls of one step."""
    for action in program.actions[0]:
        monitor.enter(action)
        if action.kind.is_compute:
            transport.take_forward(action.stage, action.microbatch)
        else:
            transport.send_forward(action.stage, action.microbatch, {})
        monitor.leave()
    transport.finish()


def measure(function: Any, rounds: int) -> float:
    """Median processor time of a call, in seconds."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return statistics.median(times)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    work = Workload.make("big")
    model = StagedModel(work.cut(1))

    def one_process() -> None:
        for x, y in work.microbatches:
            loss_of(model(x), y).backward()

    step = measure(one_process, 5) / 2
    print(f"half a step of one process: {step * 1e3:.0f} ms of processor time")
    print("schedule    actions  microseconds an action  share of the step")
    for schedule in ("1f1b", "zb1p", "zbv"):
        program = build_program(schedule, pp_size=2, num_microbatches=NUM_MICROBATCHES)
        recorder = StepRecorder(0)

        def recorded(program: Program = program, recorder: StepRecorder = recorder) -> None:
            for _ in range(100):
                run(program, recorder.begin(Silent(), Silent()), recorder)
                recorder.end(program)

        def bare(program: Program = program) -> None:
            for _ in range(100):
                run(program, Silent(), Silent())

        extra = (measure(recorded, 9) - measure(bare, 9)) / 100
        count = len(program.actions[0])
        print(f"{schedule:10s} {count:8d} {extra / count * 1e6:23.2f} {extra / step:18.4%}")


if __name__ == "__main__":
    main()
