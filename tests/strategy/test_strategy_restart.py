"""A batch whose step calls a unit for the first time is run twice, and counted once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_lightning.testing import run_distributed
from tests.strategy.strategy_cases import Classifier, fit, largest_difference, make_loader, pipeline


class LateHead(Classifier):
    """A second head joins in the second batch of the first epoch, and of every epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        features, labels = batch
        hidden = self.net[:4](features)
        logits = self.net[4](hidden)
        loss = F.cross_entropy(logits, labels)
        if batch_idx == 1:
            loss = loss + F.cross_entropy(self.extra(hidden), labels)
        self.accuracy(logits, labels)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return loss


def run_pipeline(schedule: str) -> tuple[list[float], list[dict[str, float]], dict[str, Tensor]]:
    module, trainer, seen = fit(
        pipeline(schedule=schedule), LateHead, loader=make_loader(), devices=2, accumulate_grad_batches=2
    )
    with trainer.strategy.whole_module():
        state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    return seen.losses, seen.metrics, state


@pytest.mark.parametrize("schedule", ["zbv", "1f1b"])
@pytest.mark.filterwarnings("ignore")
def test_a_batch_that_runs_again_is_counted_once(schedule: str) -> None:
    """Losses, metric states, accumulated gradients and parameters equal one device, although a batch ran twice."""
    plain, _, expected = fit("auto", LateHead, loader=make_loader(), accumulate_grad_batches=2)
    losses, metrics, state = run_distributed(run_pipeline, 2, (schedule,), timeout=120)[0]
    assert losses == pytest.approx(expected.losses, rel=1e-5)
    for ours, theirs in zip(metrics, expected.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert largest_difference(state, plain.state_dict()) < 1e-5
    assert torch.isfinite(torch.tensor(losses)).all()
