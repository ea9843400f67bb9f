"""Modules that ``configure_model`` builds on the meta device."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from d9d_lightning import D9DStrategy
from d9d_lightning.partition.placeholder import Placeholder
from d9d_lightning.testing import run_distributed
from tests.strategy.strategy_cases import QUIET


class MetaModule(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Sequential | None = None

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(6)]
                self.net = nn.Sequential(*layers, nn.Linear(8, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        assert self.net is not None
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(devices: int) -> tuple[float, int, int]:
    L.seed_everything(3, verbose=False)
    data = TensorDataset(torch.randn(24, 8), torch.randint(0, 2, (24,)))
    trainer = L.Trainer(
        **QUIET,
        devices=devices,
        strategy=D9DStrategy(schedule="zbv", num_microbatches=2),
        max_epochs=1,
    )
    module = MetaModule()
    trainer.fit(module, DataLoader(data, batch_size=8))
    given_up = sum(isinstance(p, Placeholder) for p in module.parameters())
    return float(trainer.callback_metrics["loss"]), given_up, sum(p.is_meta for p in module.parameters())


@pytest.mark.filterwarnings("ignore")
def test_a_module_built_on_the_meta_device_trains_where_it_is_owned() -> None:
    """Each process allocates its own parameters only, and the loss is that of one process."""
    alone = run_distributed(fit, 1, (1,))[0]
    ranks = run_distributed(fit, 2, (2,))
    assert alone[1] == 0 and all(given_up > 0 for _, given_up, _ in ranks)
    assert all(on_meta == 0 for _, _, on_meta in (alone, *ranks))
    assert ranks[0][0] == ranks[1][0] == pytest.approx(alone[0], rel=1e-6)
