"""A step through ``Trainer(strategy=D9DStrategy(...))`` against the bare executor and torch, in the same rounds.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/pipeline/trainer.py --schedule zbv --seconds 30

The other runners take their turns between the Trainer's batches. A Trainer sample lasts from the end of their turns to
the end of the next batch, so everything that the loop does for a batch is in it; the optimizer computes nothing, since
the bare runners have none. Lightning's own DDP is timed by ``--schedule ddp``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from measure import Samples, Stopwatch, describe_ratio, time_alone
from runners import PAIRS, Runner, data_parallel, make_groups, one_process, our_hand_split, our_pipeline, torch_pipeline
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from workload import NUM_MICROBATCHES, StagedModel, Workload, loss_of

from d9d_lightning import D9DStrategy

_FAMILIES = {pair.ours: pair for pair in PAIRS}
"""The last of a name has as many stages per rank as the strategy chooses."""


class NoStep(torch.optim.SGD):
    """Runs the closure and changes nothing."""

    def step(self, closure: Any = None) -> Any:
        return closure() if closure is not None else None


class Module(LightningModule):
    def __init__(self, work: Workload, num_stages: int) -> None:
        super().__init__()
        self.model = StagedModel(work.cut(num_stages))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return loss_of(self.model(x), y)

    def configure_optimizers(self) -> Any:
        return NoStep(self.parameters(), lr=0.0)


class SameBatch(IterableDataset):
    def __init__(self, batch: tuple[Tensor, Tensor]) -> None:
        self._batch = batch

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self._batch


class TakeTurns(Callback):
    """Times the others between batches, and the batches themselves."""

    def __init__(self, work: Workload, schedule: str, seconds: float) -> None:
        self._work, self._schedule, self._seconds = work, schedule, seconds
        self._watch = Stopwatch()
        self._running = False
        self._end = 0.0
        self.samples: dict[str, Samples] = {}
        self.errors: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._alone = one_process(self._work)
        self._others: dict[str, Runner] = {"both alone": self._alone, "DDP": data_parallel(self._work)}
        pair = _FAMILIES.get(self._schedule)
        if pair is not None:
            if pair.torch_name is not None:
                self._others["torch"] = torch_pipeline(self._work, pair)
            groups = make_groups()
            self._others["hand-split"] = our_hand_split(self._work, pair, groups)
            self._others["replay"] = our_pipeline(self._work, pair, groups)
        self.samples = {name: Samples() for name in ("solo", *self._others, "Trainer")}

    def on_before_zero_grad(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        if "Trainer" in self.errors or self._schedule == "ddp" or trainer.global_step == 0:
            return
        self._alone.clear()
        self._alone.step()
        expected = dict(torch.nn.ModuleList(self._alone.blocks.values()).named_parameters())
        blocks = [block for stage in pl_module.model.stages for block in stage]
        found = dict(torch.nn.ModuleList(blocks).named_parameters())
        own = [name for name, parameter in found.items() if parameter.grad is not None]
        self.errors["Trainer"] = max(
            float((found[n].grad - expected[n].grad).abs().max() / expected[n].grad.abs().max()) for n in own
        )

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._running:
            self._watch.stop(self.samples["Trainer"])
        self._running = trainer.global_step > 3
        if not self._running:
            return
        self._end = self._end or time.time() + self._seconds
        self._alone.clear()
        time_alone(self._alone.step, self.samples["solo"])
        for name, runner in self._others.items():
            self._watch.start()
            runner.clear()  # as the Trainer does in its own turn
            runner.step()
            self._watch.stop(self.samples[name])
        over = torch.tensor([int(time.time() > self._end)])
        dist.broadcast(over, 0)
        if over:
            trainer.should_stop = True
            self._running = False
            for name in self.samples:
                count = len(self.samples["Trainer"].wall)
                for column in (self.samples[name].wall, self.samples[name].cpu, self.samples[name].quiet):
                    del column[count:]
            return
        self._watch.start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=("big", "tiny"), default="big")
    parser.add_argument("--schedule", default="zbv")
    parser.add_argument("--seconds", type=float, default=30)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    work = Workload.make(options.case)
    batch = (work.x, work.y)
    if options.schedule == "ddp":
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        batch = (work.x.chunk(size)[rank], work.y.chunk(size)[rank])
        strategy: Any = "ddp"
    else:
        strategy = D9DStrategy(options.schedule, num_microbatches=NUM_MICROBATCHES, units=["model.stages.*"])
    turns = TakeTurns(work, options.schedule, options.seconds)
    num_stages = 2 * _FAMILIES[options.schedule].stages_per_rank if options.schedule in _FAMILIES else 1
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_steps=-1, callbacks=[turns], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(work, num_stages), DataLoader(SameBatch(batch), batch_size=None))
    print(f"rank {os.environ['RANK']}: gradient error of the Trainer {turns.errors}", flush=True)
    if os.environ["RANK"] == "0":
        report(options.schedule, turns.samples)
    sys.stdout.flush()


def report(schedule: str, samples: dict[str, Samples]) -> None:
    trained = samples["Trainer"]
    print(f"{schedule}: {len(trained.wall)} rounds, quiet { ({n: s.num_quiet for n, s in samples.items()}) }")
    for name, entry in samples.items():
        if name != "Trainer" and name != "both alone":
            print(f"  Trainer / {name}: {describe_ratio(trained, entry)}")
    middle = {name: f"{statistics.median(entry.cpu) * 1e3:.2f}" for name, entry in samples.items() if entry.cpu}
    print(f"  main thread, ms of CPU in a step: {middle}")
    if "hand-split" in samples:
        print(f"  replay / hand-split: {describe_ratio(samples['replay'], samples['hand-split'])}")
    if "hand-split" in samples and "torch" in samples:
        print(f"  hand-split / torch: {describe_ratio(samples['hand-split'], samples['torch'])}")


if __name__ == "__main__":
    main()
