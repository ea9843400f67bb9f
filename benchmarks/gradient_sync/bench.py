"""How much communication stays exposed: GradientSynchronizer against DistributedDataParallel over a slow wire.

    python benchmarks/gradient_sync/bench.py --rounds 30

exposed fraction = (step - step without synchronization) / communication alone
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from d9d_lightning.gradients import GradientSynchronizer
from d9d_lightning.testing import run_distributed

sys.path.insert(0, str(Path(__file__).parent))
from slow_wire import Wire, make_wire_group

LAYERS_PER_BUCKET = 2
RANKS = 2


def make_net(width: int, depth: int) -> nn.Module:
    """A stack of equal layers, the same on every rank."""
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 1))


def make_steps(width: int, depth: int, samples: int, wire: Wire) -> dict[str, Callable[[], None]]:
    """What is timed, by name; each runs one step or one exchange on this rank."""
    batch = torch.randn(samples, width)
    group = make_wire_group(wire)
    bare, ours, theirs = (make_net(width, depth) for _ in range(3))
    # Ours closes a bucket before it would exceed the limit, DDP after it has reached it: this limit suits both.
    bucket_mb = LAYERS_PER_BUCKET * 4 * width * (width + 1) / 2**20
    synchronizer = GradientSynchronizer([list(ours.parameters())], bucket_mb, 1)
    synchronizer.bind(mesh=group)
    parallel = DistributedDataParallel(
        theirs, process_group=group, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
    )
    buffers = [torch.zeros_like(bucket.buffer) for bucket in synchronizer.buckets]  # type: ignore[attr-defined]

    def without() -> None:
        bare.zero_grad()
        bare(batch).square().mean().backward()

    def synchronized() -> None:
        ours.zero_grad()
        ours(batch).square().mean().backward()
        synchronizer.wait()

    def data_parallel() -> None:
        parallel.zero_grad()
        parallel(batch).square().mean().backward()

    def alone() -> None:
        for work in [dist.all_reduce(buffer, group=group, async_op=True) for buffer in buffers]:
            work.wait()

    return {"without": without, "ours": synchronized, "ddp": data_parallel, "alone": alone}


def compute_below_communication() -> None:
    """Under ``chrt --rr 2``: leave the communication threads above this one, as a network card would be."""
    if os.sched_getscheduler(0) == os.SCHED_RR:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def measure(width: int, depth: int, samples: int, latency_ms: float, bandwidth: float, rounds: int) -> dict[str, float]:
    """Median milliseconds of each kind of step on this rank, taken in turn so that all see the same machine."""
    steps = make_steps(width, depth, samples, Wire(latency_ms, bandwidth))
    compute_below_communication()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 3):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            if number >= 3:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Measure each wire and print one table row for it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=13)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--bandwidth", type=float, default=1000.0, help="MB/s")
    options = parser.parse_args()
    print("| latency, ms | without, ms | alone, ms | ours, ms | DDP, ms | ours exposed | DDP exposed |")
    print("|---|---|---|---|---|---|---|")
    for latency_ms in (2.0, 5.0, 10.0):
        args = (options.width, options.depth, options.samples, latency_ms, options.bandwidth, options.rounds)
        ranks = run_distributed(measure, RANKS, args, timeout=600, fresh=True)
        times = {name: max(rank[name] for rank in ranks) for name in ranks[0]}
        exposed = {name: (times[name] - times["without"]) / times["alone"] for name in ("ours", "ddp")}
        shown = "".join(f" {times[name]:.1f} |" for name in ("without", "alone", "ours", "ddp"))
        print(f"| {latency_ms:g} |{shown} {exposed['ours']:.2f} | {exposed['ddp']:.2f} |")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
