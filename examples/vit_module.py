"""A small vision transformer for 8x8 images of digits, as an ordinary LightningModule.

Nothing in this file knows how it will be trained: it runs under any Lightning strategy.
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

NUM_CLASSES = 10
IMAGE_SIZE = 8


class Block(nn.Module):
    """Pre-norm transformer block on ``[batch, token, width]``."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        # No bias: that of the keys cancels in the softmax, so its gradient is nothing but rounding, and Adam, which
        # scales every gradient to one size, would make steps of it.
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, tokens: Tensor) -> Tensor:
        batch, count, width = tokens.shape
        qkv = self.qkv(self.attention_norm(tokens)).view(batch, count, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(batch, count, width)
        tokens = tokens + self.projection(mixed)
        return tokens + self.mlp(self.mlp_norm(tokens))


class VisionTransformer(nn.Module):
    """Images ``[batch, 1, 8, 8]`` to logits ``[batch, 10]``."""

    def __init__(self, width: int = 64, depth: int = 4, heads: int = 4, patch: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (IMAGE_SIZE // patch) ** 2 + 1, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(images), -1, -1), tokens], dim=1) + self.positions
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens[:, 0]))


class DigitsClassifier(LightningModule):
    """Cross entropy, accuracy, AdamW and a learning rate that changes with every step."""

    def __init__(self, learning_rate: float = 4e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = VisionTransformer()
        self.train_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.val_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        self.train_accuracy(logits, labels)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.val_accuracy(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), prog_bar=True)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        rate = self.hparams["learning_rate"]
        optimizer = torch.optim.AdamW(self.parameters(), lr=rate, weight_decay=0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=rate, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class DigitsData(LightningDataModule):
    """scikit-learn's 1,797 digits: 1,437 to train on, so that the last batch is smaller, and 360 to validate."""

    def __init__(self, batch_size: int = 48, seed: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.seed = seed

    def setup(self, stage: str) -> None:
        images, labels = load_digits(return_X_y=True)
        pixels = torch.tensor(images, dtype=torch.float32).view(-1, 1, IMAGE_SIZE, IMAGE_SIZE) / 8 - 1
        train_x, val_x, train_y, val_y = train_test_split(
            pixels, torch.tensor(labels, dtype=torch.long), test_size=360, stratify=labels, random_state=self.seed
        )
        self.train_set = TensorDataset(train_x, train_y)
        self.val_set = TensorDataset(val_x, val_y)

    def train_dataloader(self) -> DataLoader[Any]:
        order = torch.Generator().manual_seed(self.seed)
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True, generator=order)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val_set, batch_size=self.batch_size)
