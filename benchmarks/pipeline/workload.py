"""The model and batch that every runner computes, and how they are cut into stages."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CASES = {"big": (512, 64, 16), "tiny": (32, 8, 1)}
"""Name to hidden size, rows and sequence length."""

NUM_BLOCKS = 8
NUM_MICROBATCHES = 8


class Block(nn.Module):
    """Pre-norm residual MLP, ``[rows, sequence, hidden]`` to the same."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


@dataclass(frozen=True)
class Workload:
    """One model and one batch, equal on every rank; a stage is a ``Sequential`` of consecutive blocks."""

    blocks: nn.ModuleList
    x: Tensor
    y: Tensor

    @classmethod
    def make(cls, case: str) -> Workload:
        hidden, rows, sequence = CASES[case]
        torch.manual_seed(0)
        blocks = nn.ModuleList(Block(hidden) for _ in range(NUM_BLOCKS))
        return cls(blocks, torch.randn(rows, sequence, hidden), torch.randn(rows, sequence, hidden))

    def cut(self, num_stages: int) -> nn.ModuleList:
        """A fresh copy of the model as a list of stages."""
        per_stage = NUM_BLOCKS // num_stages
        blocks = copy.deepcopy(self.blocks)
        return nn.ModuleList(nn.Sequential(*blocks[s * per_stage : (s + 1) * per_stage]) for s in range(num_stages))

    @property
    def microbatches(self) -> list[tuple[Tensor, Tensor]]:
        """The batch in slices."""
        return list(zip(self.x.chunk(NUM_MICROBATCHES), self.y.chunk(NUM_MICROBATCHES), strict=True))


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    """The loss of one microbatch; the batch's is the mean of them."""
    return nn.functional.mse_loss(output, target)


class StagedModel(nn.Module):
    """What a user would write: all stages in a row."""

    def __init__(self, stages: nn.ModuleList) -> None:
        super().__init__()
        self.stages = stages

    def forward(self, x: Tensor) -> Tensor:
        for stage in self.stages:
            x = stage(x)
        return x
