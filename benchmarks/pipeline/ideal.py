"""What a schedule could reach on this machine: the simulator's makespan under costs measured in the same run."""

from __future__ import annotations

import statistics
import time

import torch
from runners import Pair
from workload import NUM_MICROBATCHES, StagedModel, Workload, loss_of

from d9d_lightning.schedule import Costs, simulate
from d9d_lightning.stage.split_backward import full_backward, split_backward


def measure_costs(work: Workload, size: int, rounds: int = 9) -> Costs:
    """Processor seconds of F, B, I and W of one microbatch on one rank's share of the blocks."""
    stage = StagedModel(work.cut(size)[:1])
    x, y = work.microbatches[0]
    times: dict[str, list[float]] = {"F": [], "B": [], "I": [], "W": []}

    def clock(kind: str, call: object) -> object:
        start = time.thread_time()
        result = call()  # type: ignore[operator]
        times[kind].append(time.thread_time() - start)
        return result

    for _ in range(rounds):
        for kind in ("B", "I"):
            leaf = x.clone().requires_grad_()
            loss = clock("F", lambda leaf=leaf: loss_of(stage(leaf), y))
            one = torch.ones(())
            if kind == "B":
                clock("B", lambda loss=loss, leaf=leaf, one=one: full_backward([loss], [one], [leaf]))
            else:
                _, rest = clock("I", lambda loss=loss, leaf=leaf, one=one: split_backward([loss], [one], [leaf]))
                del loss
                clock("W", rest.run)
    middle = {kind: statistics.median(values) for kind, values in times.items()}
    return Costs(middle["F"], middle["I"], middle["W"], backward_full=middle["B"])


def ideal_speedup(pair: Pair, size: int, costs: Costs) -> float:
    """One process over the simulated makespan; transfers are free."""
    alone = size * NUM_MICROBATCHES * (costs.forward + costs.backward_full)  # type: ignore[operator]
    return alone / simulate(pair.program(size), costs.divide(pair.stages_per_rank)).span  # type: ignore[no-any-return]
