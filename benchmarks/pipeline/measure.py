"""Samples that know whether the machine was quiet, in rounds in which every runner has one turn.

Unfiltered medians mislead on a shared machine. A sample is *quiet* when other processes used less than ``FOREIGN`` of
one processor during it, by the counters of ``/proc/stat`` less our own. Ratios pair two runners within a round.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

FOREIGN = 0.08


@dataclass
class Samples:
    """Seconds of each round; ``cpu`` is the time of the main thread on the busiest rank, which waits do not enter."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    quiet: list[bool] = field(default_factory=list)

    def median(self, only_quiet: bool) -> float:
        kept = [w for w, q in zip(self.wall, self.quiet, strict=True) if q or not only_quiet]
        return statistics.median(kept) if kept else float("nan")

    @property
    def num_quiet(self) -> int:
        return sum(self.quiet)

    def low(self) -> float:
        """The 10th percentile: what a step takes when it is disturbed least."""
        return sorted(self.wall)[len(self.wall) // 10]


class Stopwatch:
    """Times one step on all ranks: from when all are ready until all have ended."""

    def __init__(self) -> None:
        self._start = (0.0, 0.0, 0.0, 0.0)

    def start(self) -> None:
        dist.barrier()
        self._start = (_busy(), time.process_time(), time.thread_time(), time.perf_counter())

    def stop(self, samples: Samples) -> None:
        busy, process, thread, wall = self._start
        thread = time.thread_time() - thread
        dist.barrier()
        wall, busy = time.perf_counter() - wall, _busy() - busy
        own = torch.tensor([time.process_time() - process], dtype=torch.float64)
        dist.all_reduce(own)
        slowest = torch.tensor([wall, thread], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        # the counters tick every 10 ms, so a short sample cannot tell
        quiet = wall > 0.1 and (busy - float(own)) / wall < FOREIGN
        share = torch.tensor([int(quiet)])
        dist.all_reduce(share, dist.ReduceOp.MIN)
        samples.wall.append(float(slowest[0]))
        samples.cpu.append(float(slowest[1]))
        samples.quiet.append(bool(share))


def time_alone(step: Callable[[], object], samples: Samples) -> None:
    """Time a step of rank 0 while all others wait."""
    watch = Stopwatch()
    watch.start()
    if dist.get_rank() == 0:
        step()
    watch.stop(samples)


def ratio(numerator: Samples, denominator: Samples) -> tuple[float, float, float, int, bool]:
    """Median of the paired ratios with its bootstrap interval of 95 %, the number of pairs, and whether all are quiet.

    Falls back to all pairs where fewer than five are quiet.
    """
    pairs = list(zip(numerator.wall, denominator.wall, numerator.quiet, denominator.quiet, strict=True))
    quiet = [a / b for a, b, p, q in pairs if p and q]
    values = quiet if len(quiet) >= 5 else [a / b for a, b, _, _ in pairs]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return statistics.median(values), medians[50], medians[1949], len(values), values is quiet


def describe_ratio(numerator: Samples, denominator: Samples) -> str:
    """``0.97 [0.95, 0.99] of 12 pairs``; a star where the pairs are not all quiet."""
    middle, low, high, count, quiet = ratio(numerator, denominator)
    return f"{middle:.3f} [{low:.3f}, {high:.3f}] n={count}{'' if quiet else '*'}"


def _busy() -> float:
    """Processor seconds spent by anyone so far."""
    with open("/proc/stat") as stat:
        fields = [int(value) for value in stat.readline().split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
