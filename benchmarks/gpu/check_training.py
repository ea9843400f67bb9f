"""The strategy on one GPU trains like a plain Trainer on that GPU, in float32 and bfloat16-mixed, with clipping."""

from __future__ import annotations

import argparse
import logging
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from d9d_lightning import D9DStrategy

_STEPS = 6


class Classifier(pl.LightningModule):
    """Four layers and a loss that is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *[layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.GELU())], nn.Linear(32, 4)
        )

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Cross entropy of a batch."""
        samples, labels = batch
        loss = nn.functional.cross_entropy(self.net(samples), labels)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(device: str, precision: str, strategy: object) -> tuple[Classifier, float]:
    """Train from a fixed start; the module and its last logged loss."""
    pl.seed_everything(0, verbose=False)
    module = Classifier()
    generator = torch.Generator().manual_seed(1)
    samples = torch.randn(8 * _STEPS, 32, generator=generator)
    labels = torch.randint(0, 4, (8 * _STEPS,), generator=generator)
    trainer = pl.Trainer(
        accelerator="gpu" if device == "cuda" else "cpu",
        devices=1,
        strategy=strategy,
        precision=precision,
        max_epochs=1,
        gradient_clip_val=0.1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(samples, labels), batch_size=8))
    return module.cpu(), float(trainer.callback_metrics["train_loss"])


def main() -> None:
    """Compare both trainers for each precision."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    # float32 has to agree closely; bfloat16 rounds each microbatch differently from the whole batch.
    for precision, tolerance in (("32-true", 1e-4), ("bf16-mixed", 2e-2)):
        module, loss = train(device, precision, D9DStrategy(num_microbatches=2))
        reference, expected = train(device, precision, "auto")
        torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
        for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
    print("training: as a plain Trainer on the same device")


if __name__ == "__main__":
    main()
