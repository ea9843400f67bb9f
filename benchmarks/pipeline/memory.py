"""Memory of a step: how far it rises above what is held before, gradients and activations together, on the worst rank.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/pipeline/memory.py

Runners come one after the other; each frees what it has before the next is built. Linux only (``/proc/self``).
"""

from __future__ import annotations

import ctypes
import gc
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from runners import PAIRS, Runner, data_parallel, make_groups, one_process, our_pipeline, torch_pipeline
from workload import Workload

_TRIM = ctypes.CDLL(None).malloc_trim


def rise_of_a_step(runner: Runner) -> tuple[float, float]:
    """Mebibytes above the state without gradients, and mebibytes of the own parameters; the largest of all ranks."""
    runner.step()
    runner.clear()
    gc.collect()
    _TRIM(0)
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # the peak starts again at what is held now
    before = _status("VmRSS")
    runner.step()
    peak = _status("VmHWM")
    weights = sum(p.numel() * p.itemsize for block in runner.blocks.values() for p in block.parameters())
    found = torch.tensor([(peak - before) / 2**10, weights / 2**20])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    runner.clear()
    return float(found[0]), float(found[1])


def _status(name: str) -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(f"{name}:"))


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    work, groups = Workload.make("big"), make_groups()
    makers: dict[str, Callable[[], Runner]] = {
        "one process": lambda: one_process(work),
        "DDP": lambda: data_parallel(work),
    }
    for pair in PAIRS:
        if pair.torch_name is not None:
            makers[f"torch {pair.label}"] = lambda pair=pair: torch_pipeline(work, pair)
        makers[f"ours {pair.label}"] = lambda pair=pair: our_pipeline(work, pair, groups)
    if dist.get_rank() == 0:
        print("| runner | step, MiB | own parameters, MiB |\n|---|---|---|")
    for name, make in makers.items():
        rise, weights = rise_of_a_step(make())
        gc.collect()
        if dist.get_rank() == 0:
            print(f"| {name} | {rise:.0f} | {weights:.0f} |", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
