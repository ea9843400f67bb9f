"""Pipelines of two, replicated twice: four processes equal one device on the same global batches."""

from __future__ import annotations

import os
import tempfile
from itertools import product
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from d9d_lightning import D9DStrategy
from d9d_lightning.testing import run_distributed
from tests.strategy.strategy_cases import QUIET, largest_difference

BATCH, STEPS = 8, 3


class TiedModel(L.LightningModule):
    """An embedding tied to the head, so that two stages share a parameter; two named groups, a step scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, targets = batch
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        loss = F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        decayed = [p for p in self.parameters() if p.dim() > 1]
        plain = [p for p in self.parameters() if p.dim() <= 1]
        optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": 0.1, "name": "decayed"},
                {"params": plain, "weight_decay": 0.0, "name": "plain"},
            ],
            lr=1e-2,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(accumulate: int, replicas: int) -> DataLoader[Any]:
    source = torch.Generator().manual_seed(1)
    samples = BATCH * accumulate * STEPS
    ids = torch.randint(0, 11, (samples, 5), generator=source)
    targets = torch.randint(0, 11, (samples, 5), generator=source)
    if replicas > 1:  # a distributed sampler deals samples out in turn: lay them so that global batches are equal
        order = torch.arange(samples).reshape(-1, replicas, BATCH // replicas).transpose(1, 2).reshape(-1)
        ids, targets = ids[order], targets[order]
    return DataLoader(TensorDataset(ids, targets), batch_size=BATCH // replicas)


def train(
    devices: int, strategy: Any, accumulate: int, replicas: int
) -> tuple[dict[str, Tensor], float, dict[str, Tensor]]:
    L.seed_everything(5, verbose=False)
    module = TiedModel()
    trainer = L.Trainer(
        **QUIET,
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.1,
        use_distributed_sampler=True,
    )
    trainer.fit(module, _with_order(loader(accumulate, replicas), replicas))
    path = os.path.join(tempfile.gettempdir(), f"replicated-{os.environ.get('MASTER_PORT', os.getpid())}.ckpt")
    trainer.save_checkpoint(path)
    state: dict[str, Tensor] = torch.load(path, weights_only=True)["state_dict"] if trainer.global_rank == 0 else {}
    own = {name: p.detach().clone() for name, p in module.named_parameters() if type(p) is nn.Parameter}
    return state, float(trainer.callback_metrics["loss_epoch"]), own


def _with_order(data: DataLoader[Any], replicas: int) -> DataLoader[Any]:
    if replicas == 1:
        return data
    # Lightning injects a shuffling sampler for training: give the plain one instead
    rank = int(os.environ["RANK"])
    pipeline = 2
    replica = rank % replicas if pipeline * replicas == int(os.environ["WORLD_SIZE"]) else 0
    sampler = torch.utils.data.distributed.DistributedSampler(data.dataset, replicas, replica, shuffle=False)
    return DataLoader(data.dataset, batch_size=data.batch_size, sampler=sampler)


def run(schedule: str, accumulate: int, microbatches: int) -> tuple[dict[str, Tensor], float, dict[str, Tensor]]:
    strategy = D9DStrategy(
        schedule=schedule, pipeline_parallel_size=2, data_parallel_size=2, num_microbatches=microbatches
    )
    return train(4, strategy, accumulate, 2)


GRID = [(s, a, m) for s, a, m in product(("zbv", "1f1b", "gpipe"), (1, 3), (1, 2, 4))]
DEFAULT = {("zbv", 1, 2), ("1f1b", 3, 2)}


@pytest.mark.parametrize(
    ("schedule", "accumulate", "microbatches"),
    [pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.full) for case in GRID],
)
@pytest.mark.filterwarnings("ignore")
def test_replicated_pipelines_equal_one_device(schedule: str, accumulate: int, microbatches: int) -> None:
    """Parameters, loss, clipping, accumulation and tied weights are those of one device; replicas are bit-equal."""
    expected, loss, _ = train(1, "auto", accumulate, 1)
    ranks = run_distributed(run, 4, (schedule, accumulate, microbatches), timeout=120)
    assert largest_difference(expected, ranks[0][0]) < 1e-5
    assert ranks[0][1] == pytest.approx(loss, rel=1e-5)
    assert len({rank[1] for rank in ranks}) == 1
    for one, other in ((0, 1), (2, 3)):
        assert ranks[one][2].keys() == ranks[other][2].keys()
        assert all(torch.equal(ranks[one][2][name], ranks[other][2][name]) for name in ranks[one][2])
