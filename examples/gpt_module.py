"""A character-level GPT on the King James Bible, as an ordinary LightningModule.

Nothing in this file knows how it will be trained: it runs under any Lightning strategy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from kjv import read_verses
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler

CONTEXT = 128


class Block(nn.Module):
    """Pre-norm transformer block on ``[batch, character, width]``; a character sees those before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        batch, count, width = hidden.shape
        qkv = self.qkv(self.attention_norm(hidden)).view(batch, count, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(batch, count, width))
        return hidden + self.mlp(self.mlp_norm(hidden))


class GPT(nn.Module):
    """Characters ``[batch, character]`` to logits ``[batch, character, vocabulary]``; the head is the embedding."""

    def __init__(self, vocabulary: int, width: int = 96, depth: int = 4, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        for table in (self.embedding, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, characters: Tensor) -> Tensor:
        places = torch.arange(characters.shape[1], device=characters.device)
        hidden = self.embedding(characters) + self.positions(places)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class CharacterModel(LightningModule):
    """Cross entropy of the next character, reported in bits."""

    def __init__(self, alphabet: str, learning_rate: float = 4e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.alphabet = alphabet
        self.net = GPT(len(alphabet))

    def forward(self, characters: Tensor) -> Tensor:
        return self.net(characters)

    def loss_of(self, batch: Tensor) -> Tensor:
        logits = self(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_bits", self.loss_of(batch) / math.log(2), prog_bar=True)

    def configure_optimizers(self) -> Any:
        rate = self.hparams["learning_rate"]
        parameters = list(self.parameters())
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    @torch.no_grad()
    def generate(self, prompt: str, length: int, seed: int = 0) -> str:
        """The prompt continued by ``length`` characters, drawn with a generator of their own."""
        draws = torch.Generator().manual_seed(seed)
        characters = [self.alphabet.index(character) for character in prompt]
        for _ in range(length):
            window = torch.tensor([characters[-CONTEXT:]], device=self.device)
            probabilities = self(window)[0, -1].float().div(0.7).softmax(-1)
            characters.append(int(torch.multinomial(probabilities.cpu(), 1, generator=draws)))
        return "".join(self.alphabet[character] for character in characters)


class Windows(Dataset[Tensor]):
    """Pieces of a text, each one character longer than the context."""

    def __init__(self, text: Tensor) -> None:
        self.text = text

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * CONTEXT : (index + 1) * CONTEXT + 1]


class EpochOrder(Sampler[int]):
    """Some samples of the data in an order that follows from the epoch, so that a resumed run meets the same ones."""

    def __init__(self, available: int, count: int) -> None:
        self.available = available
        self.count = count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Called by Lightning when an epoch begins."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(self.available, generator=torch.Generator().manual_seed(self.epoch))
        return iter(order[: self.count].tolist())


class KingJamesData(LightningDataModule):
    """4.1 million characters; the last twentieth of the text is for validation."""

    def __init__(self, batch_size: int = 8, batches_per_epoch: int = 200, val_batches: int = 16) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.batches_per_epoch = batches_per_epoch
        self.val_batches = val_batches
        text = "\n".join(verse.text for verse in read_verses())
        self.alphabet = "".join(sorted(set(text)))
        number = {character: index for index, character in enumerate(self.alphabet)}
        characters = torch.tensor([number[character] for character in text], dtype=torch.long)
        border = len(characters) * 19 // 20
        self.train_set, self.val_set = Windows(characters[:border]), Windows(characters[border:])

    def train_dataloader(self) -> DataLoader[Tensor]:
        order = EpochOrder(len(self.train_set), self.batch_size * self.batches_per_epoch)
        return DataLoader(self.train_set, batch_size=self.batch_size, sampler=order)

    def val_dataloader(self) -> DataLoader[Tensor]:
        some = range(0, len(self.val_set), len(self.val_set) // (self.val_batches * self.batch_size))
        picked = torch.utils.data.Subset(self.val_set, list(some)[: self.val_batches * self.batch_size])
        return DataLoader(picked, batch_size=self.batch_size)
