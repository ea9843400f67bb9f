"""A Llama of ``transformers`` as it comes, which torch's tools cannot cut by themselves: ours against one process.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 benchmarks/pipeline/llama.py --rounds 20

Between the Trainer's batches the same batch runs in one process and through the bare pipeline, so that all three see
the same machine. Gradients of both of ours are compared with one process, parameter by parameter.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import warnings
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from measure import Samples, Stopwatch, describe_ratio, time_alone
from runners import make_groups
from torch import Tensor, nn
from torch.utils.data import DataLoader
from trainer import NoStep, SameBatch
from transformers import LlamaConfig, LlamaForCausalLM

from d9d_lightning import D9DStrategy
from d9d_lightning.runtime.pipeline import Pipeline
from d9d_lightning.schedule import Program, build_program
from d9d_lightning.values import Microbatch

ROWS, LENGTH, NUM_MICROBATCHES, WORDS = 16, 64, 8, 2000
Gradients = dict[str, Tensor]


def build_llama(hidden: int, layers: int) -> LlamaForCausalLM:
    """Random weights, equal on every rank."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
            num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=LENGTH, use_cache=False,
        )
    )  # fmt: skip


class Module(LightningModule):
    """What a user writes."""

    def __init__(self, net: LlamaForCausalLM) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return NoStep(self.parameters(), lr=0.0)


def gradients_of(module: nn.Module) -> Gradients:
    """Of the parameters that are here."""
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def largest_error(found: Gradients, expected: Gradients) -> float:
    """Largest difference of any gradient, as a share of its largest entry."""
    return max(float((found[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in found)


class TakeTurns(Callback):
    """Runs one process and the bare pipeline between the Trainer's batches."""

    def __init__(self, net: LlamaForCausalLM, ids: Tensor, program: Program, rounds: int) -> None:
        self._whole, self._cut = Module(net), Module(copy.deepcopy(net))
        self._parts, self._program, self._rounds = ids.chunk(NUM_MICROBATCHES), program, rounds
        self._watch = Stopwatch()
        self._running = False
        self.samples = {name: Samples() for name in ("one process", "bare", "Trainer")}
        self.errors: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        size = dist.get_world_size()
        self._pipeline = Pipeline(
            self._cut, stage_to_rank=self._program.stage_to_rank, rank=dist.get_rank(), size=size, groups=make_groups()
        )
        self._batch = [Microbatch(i, len(part), (part, 0)) for i, part in enumerate(self._parts)]
        self._pipeline.place(self._user_step, self._batch)
        self._pipeline.release()

    def _user_step(self, microbatch: Microbatch) -> Tensor:
        return self._cut.training_step(*microbatch.args)

    def _bare(self) -> None:
        self._pipeline.run(self._user_step, self._batch, self._program, finish=lambda _, loss: loss / NUM_MICROBATCHES)

    def _one_process(self) -> None:
        for part in self._parts:
            (self._whole.training_step(part, 0) / NUM_MICROBATCHES).backward()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: Any, optimizer: Any) -> None:
        if self.errors:
            return
        self._one_process()
        expected = gradients_of(self._whole)
        self._bare()
        self.errors["bare"] = largest_error(gradients_of(self._cut), expected)
        self.errors["Trainer"] = largest_error(gradients_of(pl_module), expected)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._running:
            self._watch.stop(self.samples["Trainer"])
        if trainer.global_step > self._rounds + 2:
            trainer.should_stop = True
            return
        self._running = trainer.global_step > 2
        if self._running:
            self._whole.zero_grad()
            self._cut.zero_grad()
            time_alone(self._one_process, self.samples["one process"])
            self._watch.start()
            self._bare()
            self._watch.stop(self.samples["bare"])
            self._watch.start()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", default="zbv")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    net = build_llama(options.hidden, options.layers)
    ids = torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    program = build_program(options.schedule, pp_size=2, num_microbatches=NUM_MICROBATCHES)
    turns = TakeTurns(net, ids, program, options.rounds)
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=D9DStrategy(options.schedule, num_microbatches=NUM_MICROBATCHES),
        max_steps=-1, callbacks=[turns], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(copy.deepcopy(net)), DataLoader(SameBatch(ids), batch_size=None))  # type: ignore[arg-type]
    print(f"rank {os.environ['RANK']}: gradient errors {turns.errors}", flush=True)
    if os.environ["RANK"] == "0":
        alone = turns.samples["one process"]
        for name in ("bare", "Trainer"):
            print(f"{options.schedule}, {name} / one process: {describe_ratio(turns.samples[name], alone)}")
        print(f"Trainer / bare: {describe_ratio(turns.samples['Trainer'], turns.samples['bare'])}")
        cpu = {name: f"{statistics.median(entry.cpu) * 1e3:.1f}" for name, entry in turns.samples.items()}
        print(f"main thread, ms of processor time in a step: {cpu}", flush=True)


if __name__ == "__main__":
    main()
