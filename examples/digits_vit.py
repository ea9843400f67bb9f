"""The main job: an ordinary LightningModule trains through a zero-bubble V pipeline of two processes.

    python examples/digits_vit.py              # about a minute on two cores
    python examples/digits_vit.py --compare    # also trains on one device, and prints how far the two runs are apart

The module and its data come from ``vit_module.py``, which knows nothing of this package. All that makes this a pipeline
is the ``strategy=`` of the Trainer.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from vit_module import DigitsClassifier, DigitsData

from d9d_lightning import D9DStrategy


class LossHistory(Callback):
    """Keeps the loss of every training step."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.losses.append(float(outputs["loss"]))


@dataclass
class Run:
    """What a run leaves behind: its losses, its last metrics and the file with its final weights."""

    losses: list[float]
    metrics: dict[str, Tensor]
    checkpoint: Path

    @property
    def weights(self) -> dict[str, Tensor]:
        return torch.load(self.checkpoint, weights_only=True)["state_dict"]


def train(folder: Path, epochs: int, **trainer_options: Any) -> Run:
    """Train from seed 0. Nothing here depends on how many devices take part."""
    seed_everything(0)
    history = LossHistory()
    trainer = Trainer(
        max_epochs=epochs,
        gradient_clip_val=1.0,
        log_every_n_steps=5,
        default_root_dir=folder,
        callbacks=[
            history,
            ModelCheckpoint(monitor="val_accuracy", mode="max"),
            EarlyStopping(monitor="val_loss", patience=4),
        ],
        **trainer_options,
    )
    trainer.fit(DigitsClassifier(), DigitsData())
    checkpoint = folder / "final.ckpt"
    trainer.save_checkpoint(checkpoint)
    trainer.print(f"validation accuracy: {float(trainer.callback_metrics['val_accuracy']):.4f}")
    return Run(history.losses, dict(trainer.callback_metrics), checkpoint)


@rank_zero_only
def train_on_one_device(folder: Path, epochs: int) -> Run:
    """The same job as an ordinary run, in the process of rank 0 alone."""
    print("one device:")
    torch.set_num_threads(1)  # sums in the order of the pipeline's processes, which share the cores
    return train(folder / "one_device", epochs, accelerator="cpu", devices=1)


@rank_zero_only
def compare(reference: Run, pipeline: Run) -> None:
    """Print the largest differences between two runs."""
    losses = [abs(a - b) for a, b in zip(reference.losses, pipeline.losses, strict=True)]
    expected, actual = reference.weights, pipeline.weights
    if expected.keys() != actual.keys():
        raise KeyError(f"the two checkpoints differ in their names: {sorted(expected.keys() ^ actual.keys())}")
    weights = [float((expected[name] - actual[name]).abs().max()) for name in expected]
    accuracy = abs(float(reference.metrics["val_accuracy"] - pipeline.metrics["val_accuracy"]))
    # Sums in another order differ in the last bit, and training lets such differences grow step by step.
    print(f"largest difference of loss over the first 50 steps: {max(losses[:50]):.3e}")
    print(f"largest difference of loss over all {len(losses)} steps: {max(losses):.3e}")
    print(f"largest difference of a parameter at the end: {max(weights):.3e}")
    print(f"difference of the validation accuracy: {accuracy:.4f}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small vision transformer through a pipeline.")
    parser.add_argument("--compare", action="store_true", help="also train on one device and print the differences")
    parser.add_argument("--devices", type=int, default=2, help="processes of the pipeline")
    parser.add_argument("--schedule", default="zbv", help="pipeline schedule")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--accelerator", default="cpu", help="cpu, gpu or auto")
    parser.add_argument("--folder", type=Path, default=Path("lightning_logs/digits_vit"), help="where checkpoints go")
    options = parser.parse_args()

    # Before the pipeline: from then on the process belongs to a process group, and metrics would wait for its peers.
    reference = train_on_one_device(options.folder, options.epochs) if options.compare else None
    pipeline = train(
        options.folder / "pipeline",
        options.epochs,
        accelerator=options.accelerator,
        devices=options.devices,
        strategy=D9DStrategy(schedule=options.schedule),
    )
    if options.compare:
        compare(reference, pipeline)


if __name__ == "__main__":
    main()
