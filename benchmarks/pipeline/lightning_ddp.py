"""Whole training steps, optimizer included: ``D9DStrategy`` against Lightning's own DDP on the same global batch.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/pipeline/lightning_ddp.py --schedule zbv --rounds 8

The two take turns in the same processes: in every round each fits a new copy of the model for a few batches (AdamW).
A sample is the median time of a batch of one such fit. Also printed: parameter and optimizer bytes that a rank holds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from measure import Samples, Stopwatch, describe_ratio
from torch import Tensor
from torch.utils.data import DataLoader
from trainer import Module, SameBatch
from workload import NUM_MICROBATCHES, Workload

from d9d_lightning import D9DStrategy

_WARM_UP = 3


class Trained(Module):
    """The same module with an optimizer that computes."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


class TimeBatches(Callback):
    """Times every batch of a fit from the end of the one before; keeps the median of those after the warm-up."""

    def __init__(self, samples: Samples) -> None:
        self._kept, self._all, self._watch = samples, Samples(), Stopwatch()
        self.held_bytes = 0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step > _WARM_UP:
            self._watch.stop(self._all)
        if trainer.global_step >= _WARM_UP:
            self._watch.start()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._kept.wall.append(statistics.median(self._all.wall))
        self._kept.cpu.append(statistics.median(self._all.cpu))
        self._kept.quiet.append(all(self._all.quiet))
        optimizer = trainer.optimizers[0]
        tensors = [value for state in optimizer.state.values() for value in state.values()]
        tensors += [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.held_bytes = sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


def fit(work: Workload, batch: tuple[Tensor, Tensor], strategy: Any, num_stages: int, timer: TimeBatches) -> None:
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=_WARM_UP + 5, callbacks=[timer], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Trained(work, num_stages), DataLoader(SameBatch(batch), batch_size=None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("big", "tiny"), default="big")
    parser.add_argument("--schedule", default="zbv")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=NUM_MICROBATCHES)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    work = Workload.make(options.case)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    share = (work.x.chunk(size)[rank], work.y.chunk(size)[rank])

    def ours() -> Any:
        return D9DStrategy(options.schedule, num_microbatches=options.microbatches, units=["model.stages.*.*"])

    runs: dict[str, tuple[tuple[Tensor, Tensor], Callable[[], Any]]] = {
        f"ours {options.schedule}, {options.microbatches} microbatches": ((work.x, work.y), ours),
        "Lightning DDP": (share, lambda: "ddp"),
    }
    samples = {name: Samples() for name in runs}
    held = {}
    for _ in range(options.rounds):
        for name, (batch, make) in runs.items():
            timer = TimeBatches(samples[name])
            fit(work, batch, make(), 2, timer)
            held[name] = timer.held_bytes
    ours_name, ddp_name = runs
    print(f"rank {rank}: parameters and optimizer state { ({n: f'{b / 2**20:.0f} MiB' for n, b in held.items()}) }")
    dist.barrier()
    if rank == 0:
        quiet = {name: entry.num_quiet for name, entry in samples.items()}
        print(f"{options.rounds} rounds, quiet {quiet}, load {os.getloadavg()[0]:.1f}")
        print(f"throughput, ours / Lightning DDP: {describe_ratio(samples[ddp_name], samples[ours_name])}")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
