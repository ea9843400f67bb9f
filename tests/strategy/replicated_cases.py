"""Two pipelines of two on four processes, and the one device that sees the same global batches."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from d9d_lightning import D9DStrategy
from d9d_lightning.strategy import grad_norm
from tests.strategy.strategy_cases import QUIET

PIPELINE, REPLICAS, WORDS = 2, 2, 11


class TiedModel(L.LightningModule):
    """An embedding tied to the head, so that two stages share a parameter; two named groups, a step scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def logits(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids, targets = batch
        loss = F.cross_entropy(self.logits(ids).flatten(0, 1), targets.flatten())
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        optimizer = torch.optim.AdamW(
            [
                {"params": [(n, p) for n, p in named.items() if p.dim() > 1], "weight_decay": 0.1, "name": "decayed"},
                {"params": [(n, p) for n, p in named.items() if p.dim() <= 1], "weight_decay": 0.0, "name": "plain"},
            ],
            lr=1e-2,
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Norms(L.Callback):
    """Keeps the norm of all gradients before each step, as any callback would read it."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.seen.append(float(grad_norm(pl_module)["grad_2.0_norm_total"]))


@dataclass
class Outcome:
    """What one process saw.

    Attributes:
        state: The whole module after training, on rank 0.
        own: Parameters of this process.
        loss: ``loss_epoch``.
        norms: Norm of all gradients before every step.
        scale: Loss scale, where there is one.
    """

    state: dict[str, Tensor] = field(default_factory=dict)
    own: dict[str, Tensor] = field(default_factory=dict)
    loss: float = 0.0
    norms: list[float] = field(default_factory=list)
    scale: float = 0.0


def make_tokens(samples: int, length: int = 5) -> TensorDataset:
    """Words and the words to predict. ``[samples, length]``"""
    source = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randint(0, WORDS, (samples, length), generator=source) for _ in range(2)))


class _Reordered(Dataset[Any]):
    """The samples in another order."""

    def __init__(self, data: Dataset[Any], order: Sequence[int]) -> None:
        self.data, self.order = data, order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> Any:
        return self.data[self.order[index]]


def make_loader(data: Any, batch: int, replicas: int, **options: Any) -> DataLoader[Any]:
    """Loader of one replica: batch k of all replicas together is batch k of one device, the first part first."""
    if replicas == 1:
        return DataLoader(data, batch_size=batch, **options)
    # a distributed sampler deals samples out in turn
    order = torch.arange(len(data)).reshape(-1, replicas, batch // replicas).transpose(1, 2).reshape(-1).tolist()
    laid = _Reordered(data, order)
    # Lightning injects a shuffling sampler for training: give the plain one instead
    sampler = DistributedSampler(laid, replicas, int(os.environ["RANK"]) % replicas, shuffle=False)
    return DataLoader(laid, batch_size=batch // replicas, sampler=sampler, **options)


def train(
    strategy: Any,
    devices: int,
    replicas: int,
    *,
    make: Callable[[], L.LightningModule] = TiedModel,
    batch: int = 16,
    steps: int = 3,
    accumulate: int = 1,
    data: Any = None,
    callbacks: Sequence[L.Callback] = (),
    loader_options: dict[str, Any] | None = None,
    **options: Any,
) -> Outcome:
    """Train one epoch of ``steps`` optimizer steps and look at everything."""
    L.seed_everything(5, verbose=False)
    module, norms = make(), Norms()
    settings = {**QUIET, "max_epochs": 1, "gradient_clip_val": 0.1, "use_distributed_sampler": True, **options}
    trainer = L.Trainer(
        devices=devices,
        strategy=strategy,
        accumulate_grad_batches=accumulate,
        callbacks=[norms, *callbacks],
        **settings,
    )
    data = make_tokens(batch * accumulate * steps) if data is None else data
    trainer.fit(module, make_loader(data, batch, replicas, **(loader_options or {})))
    outcome = Outcome(norms=norms.seen, loss=float(trainer.callback_metrics.get("loss_epoch", 0.0)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(trainer.strategy.broadcast(folder)) / "trained.ckpt"
        trainer.save_checkpoint(path)
        if trainer.global_rank == 0:
            outcome.state = torch.load(path, weights_only=True)["state_dict"]
    outcome.own = {name: p.detach().clone() for name, p in module.named_parameters() if type(p) is nn.Parameter}
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    outcome.scale = scaler.get_scale() if scaler is not None else 0.0
    return outcome


def replicated(**options: Any) -> D9DStrategy:
    """Two pipelines of two."""
    return D9DStrategy(pipeline_parallel_size=PIPELINE, data_parallel_size=REPLICAS, **options)


def assert_replicas_equal(ranks: Sequence[Outcome]) -> None:
    """Processes of one pipeline rank hold the same bits; processes 0 and 1 do, and 2 and 3."""
    for one, other in ((0, 1), (2, 3)):
        assert ranks[one].own.keys() == ranks[other].own.keys()
        for name, mine in ranks[one].own.items():
            assert torch.equal(mine, ranks[other].own[name]), name
