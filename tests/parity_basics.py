"""Small layers, the two plainest modules that are made of them, and batches for all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity import StepModule

WIDTH = 8
CLASSES = 3
TOKENS = 13
LENGTH = 6


def block(width: int = WIDTH) -> nn.Sequential:
    """One small layer."""
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def blocks(count: int = 6, width: int = WIDTH) -> nn.ModuleList:
    """A list of small layers."""
    return nn.ModuleList(block(width) for _ in range(count))


class Mlp(StepModule):
    """One Sequential."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)


class Residual(StepModule):
    """Blocks with residual adds in glue; other modules change one thing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()
        self.head = nn.Linear(WIDTH, CLASSES)

    def body(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = x + layer(x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.head(self.body(x)), y)


def pairs(index: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """Samples and classes."""
    source = torch.Generator().manual_seed(index)
    return torch.randn(size, WIDTH, generator=source), torch.randint(0, CLASSES, (size,), generator=source)


def tokens(index: int, size: int = 8, length: int = LENGTH) -> dict[str, Tensor]:
    """Token numbers and the next ones."""
    drawn = torch.randint(1, TOKENS, (size, length + 1), generator=torch.Generator().manual_seed(index))
    return {"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}


def translation(index: int, size: int = 8, length: int = LENGTH) -> dict[str, Tensor]:
    """Source tokens of unequal length, padded with zeros, and targets of equal length."""
    source = torch.Generator().manual_seed(index)
    drawn = torch.randint(1, TOKENS, (3, size, length), generator=source)
    lengths = torch.randint(2, length + 1, (size, 1), generator=source)
    return {"source": drawn[0] * (torch.arange(length) < lengths), "target": drawn[1], "labels": drawn[2]}


def images(index: int, size: int = 8) -> Tensor:
    """Small images."""
    return torch.randn(size, 1, 8, 8, generator=torch.Generator().manual_seed(index))
