"""What the strategy says by itself about how steps are computed."""

from __future__ import annotations

import logging
from typing import Any

import torch
from lightning_utilities.core import rank_zero
from torch import nn
from torch.nn import functional as F

from d9d_lightning.testing import run_distributed
from tests.strategy.strategy_cases import Classifier, fit, make_loader, pipeline


class Recurrent(Classifier):
    """Its last layers are LSTMs, whose kernel computes all gradients at once."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList(nn.LSTM(3, 3, batch_first=True) for _ in range(2))

    def loss_of(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        features, labels = batch
        hidden = self.net(features).unsqueeze(1)
        for cell in self.cells:
            hidden = hidden + cell(hidden)[0]
        logits = hidden.squeeze(1)
        return F.cross_entropy(logits, labels), logits


def messages_of_fit() -> list[str]:
    """What one rank says in a fit of two epochs."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = rank_zero.log  # Lightning puts a logger of its own there
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        fit(pipeline(schedule="zbv"), Recurrent, devices=2, loader=make_loader(12), max_epochs=2)
    finally:
        logger.removeHandler(handler)
    return [message for message in said if "computed whole" in message]


def test_a_backward_that_cannot_be_split_is_told_once() -> None:
    """Rank 0 says once which units have a backward that is not split, and why, though another rank may run them."""
    first, second = run_distributed(messages_of_fit, 2, init_group=False)
    assert second == []
    assert len(first) == 1, first
    assert "'cells.1'" in first[0] and "one kernel" in first[0]
