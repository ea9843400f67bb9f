"""A tied GPT starts on one device and goes on, from its checkpoint, through a pipeline of two processes.

    python examples/gpt_kjv.py              # under two minutes on two cores
    python examples/gpt_kjv.py --compare    # also trains without a break on one device, with a plain Trainer

bf16-mixed, gradients accumulated over two batches, characters of the King James Bible. The module and its data come
from ``gpt_module.py``, which knows nothing of this package. When all is trained, both processes write a text together,
each computing its own blocks.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpt_module import CharacterModel, KingJamesData
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor

from d9d_lightning import D9DStrategy

PROMPT = "And the LORD said unto "


@dataclass
class LossHistory(Callback):
    """Keeps the loss of every batch."""

    losses: list[float] = field(default_factory=list)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))


@dataclass
class TextWriter(Callback):
    """Lets all ranks write a text together at the end of training, each computing its own blocks."""

    length: int
    text: str = ""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.eval()
        self.text = pl_module.generate(PROMPT, self.length)


def make_trainer(folder: Path, epochs: int, callbacks: list[Callback], **devices: Any) -> Trainer:
    """The trainer of both halves; they differ in their devices only."""
    return Trainer(
        max_epochs=epochs,
        precision="bf16-mixed",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        log_every_n_steps=5,
        default_root_dir=folder,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=callbacks,
        **devices,
    )


def train_on_one_device(folder: Path, data: KingJamesData, epochs: int, strategy: Any) -> list[float]:
    """Train from seed 0 in this process alone, save, and return the loss of every batch."""
    torch.set_num_threads(1)  # sums in the order of the pipeline's processes, which share the cores
    seed_everything(0)
    history = LossHistory()
    trainer = make_trainer(folder, epochs, [history], accelerator="cpu", devices=1, strategy=strategy)
    trainer.fit(CharacterModel(data.alphabet), data)
    trainer.save_checkpoint(folder / "one_device.ckpt")
    print(
        f"one device, {trainer.global_step} steps: {float(trainer.callback_metrics['val_bits']):.4f} bits per character"
    )
    return history.losses


def resume_through_a_pipeline(folder: Path, data: KingJamesData, options: argparse.Namespace) -> list[float]:
    """Go on from the checkpoint of one device, and return the loss of every batch."""
    seed_everything(0)
    history, writer = LossHistory(), TextWriter(options.length)
    trainer = make_trainer(
        folder,
        options.epochs,
        [history, writer],
        accelerator=options.accelerator,
        devices=options.devices,
        strategy=D9DStrategy(schedule=options.schedule, num_microbatches=options.microbatches),
    )
    module = CharacterModel(data.alphabet)
    start = folder / "one_device.ckpt"
    before = trainer.validate(module, data, ckpt_path=start, verbose=False)[0]["val_bits"]
    trainer.print(f"the same weights through {options.devices} processes: {before:.4f} bits per character")
    trainer.fit(module, data, ckpt_path=start)
    trainer.print(
        f"pipeline, {trainer.global_step} steps: {float(trainer.callback_metrics['val_bits']):.4f} bits per character"
    )
    trainer.save_checkpoint(folder / "final.ckpt")
    with trainer.strategy.whole_module() as whole:
        alone = whole.generate(PROMPT, options.length)
    trainer.print(f"text written by all processes together:\n{writer.text}")
    trainer.print(f"equal to what one process writes with the whole module: {writer.text == alone}")
    return history.losses


@rank_zero_only
def check_file(folder: Path) -> None:
    """The final file holds the tied parameter under both names, as one tensor."""
    state: dict[str, Tensor] = torch.load(folder / "final.ckpt", weights_only=True)["state_dict"]
    tied = state["net.embedding.weight"].data_ptr() == state["net.head.weight"].data_ptr()
    print(f"embedding and head are one tensor in the final file: {tied}")


@rank_zero_only
def train_without_a_break(folder: Path, data: KingJamesData, epochs: int) -> list[float]:
    """The whole run as an ordinary one, in the process of rank 0 alone."""
    return train_on_one_device(folder / "unbroken", data, epochs, "auto")


@rank_zero_only
def compare(unbroken: list[float], halves: list[float]) -> None:
    """Print how far the two halves are from the run without a break."""
    apart = [abs(a - b) for a, b in zip(unbroken, halves, strict=True)]
    half = len(apart) // 2
    print(f"largest difference of loss up to the change: {max(apart[:half]):.3e}")
    print(f"largest difference of loss in the 10 batches after it: {max(apart[half : half + 10]):.3e}")
    print(f"largest difference of loss over all {len(apart)} batches: {max(apart):.3e}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tied GPT, and change the pipeline size under way.")
    parser.add_argument("--compare", action="store_true", help="also train without a break and print the differences")
    parser.add_argument("--devices", type=int, default=2, help="processes of the pipeline in the second half")
    parser.add_argument("--schedule", default="zbv", help="pipeline schedule")
    parser.add_argument("--microbatches", type=int, default=4, help="parts that a batch is cut into")
    parser.add_argument("--epochs", type=int, default=4, help="epochs of both halves together")
    parser.add_argument("--batches", type=int, default=200, help="batches of an epoch")
    parser.add_argument("--length", type=int, default=200, help="characters of the text written at the end")
    parser.add_argument("--accelerator", default="cpu", help="cpu, gpu or auto")
    parser.add_argument("--folder", type=Path, default=Path("lightning_logs/gpt_kjv"), help="where checkpoints go")
    options = parser.parse_args()

    data = KingJamesData(batches_per_epoch=options.batches)
    # Before the pipeline: from then on the process belongs to a process group, and metrics would wait for its peers.
    unbroken = train_without_a_break(options.folder, data, options.epochs) if options.compare else None
    strategy = D9DStrategy(schedule=options.schedule, num_microbatches=options.microbatches)
    first_half = rank_zero_only(train_on_one_device)(options.folder, data, options.epochs // 2, strategy)
    second_half = resume_through_a_pipeline(options.folder, data, options)
    check_file(options.folder)
    if unbroken is not None:
        compare(unbroken, first_half + second_half)


if __name__ == "__main__":
    main()
